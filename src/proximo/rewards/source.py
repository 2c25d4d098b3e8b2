"""The protocols of reward sources. Only `RewardSource` is required; the others are optional capabilities.

`NoReward` is the source of a run that learns from its reference alone (docs/distillation.md).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from proximo.metrics.values import MetricValue
from proximo.records import Prompt, Response, Scored
from proximo_verifiers.callables import methods_problem


@runtime_checkable
class RewardSource(Protocol):
    """Gives each response one score, with named components."""

    name: str
    """Name of the source's component in metrics and samples."""

    def score(self, responses: Sequence[Response]) -> list[Scored]:
        """One `Scored` per response, in order. A response that could not be scored has the state of a fault, no
        score."""
        ...


@runtime_checkable
class EagerSource(Protocol):
    """A source that can start scoring a response while others are still being sampled."""

    def begin(self, response: Response) -> None:
        """Starts scoring in the background and returns at once. `score` may be called with the response later.

        Called from several threads with asynchronous rollouts, also while `score` runs and for later steps than its.
        """
        ...


@runtime_checkable
class ConcurrentSource(Protocol):
    """A source whose `score` waits for other processes, so that it may be called in its own thread."""

    concurrent: bool


@runtime_checkable
class SharedSource(Protocol):
    """A source whose `score` every rank calls with all responses, such as a model that divides its passes among them.

    Any other source is called on rank 0 alone.
    """

    on_all_ranks: bool


@runtime_checkable
class MeasuredSource(Protocol):
    """A source that reports metrics."""

    def statistics(self) -> Mapping[str, MetricValue]:
        """Declared metrics of the work since the last call."""
        ...


@runtime_checkable
class CheckingSource(Protocol):
    """A source that can tell before a run whether responses to a prompt can be scored."""

    def check_prompts(self, prompts: Sequence[Prompt], origins: Mapping[str, str]) -> None:
        """Raises DataError for a prompt whose responses cannot be scored.

        `origins` has the file and row of a prompt by its id, for the message.
        """
        ...


@runtime_checkable
class ClosableSource(Protocol):
    """A source that holds processes or connections."""

    def close(self) -> None:
        """Ends everything that the source started."""
        ...


class NoReward:
    """Gives every response a score of 0, which no metric shows.

    `PPOTrainer(reference=teacher, reward=NoReward())` learns from the KL to the teacher alone.
    """

    name = "none"
    on_all_ranks = True

    def score(self, responses: Sequence[Response]) -> list[Scored]:
        """A score of 0 for each response."""
        return [Scored(response=response, score=0.0) for response in responses]


def is_eager(source: RewardSource) -> bool:
    """Whether the source can start scoring a response early, or one of the sources that it sums up can."""
    return isinstance(source, EagerSource) and getattr(source, "is_eager", True)


def source_problem(source: Any) -> str | None:
    """Why an object cannot be used as a `RewardSource`, in one sentence; None if it can."""
    problems = [methods_problem(source, ["score(responses)"])]
    if not isinstance(getattr(source, "name", None), str):
        problems.append("it has no attribute name, the name of its scores in the metrics")
    return "; ".join(problem for problem in problems if problem) or None
