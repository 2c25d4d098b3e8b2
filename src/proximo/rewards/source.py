"""What every source of scores looks like. Not the shaping of scores into rewards: that is algorithms/shaping.py."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from proximo.metrics.values import MetricValue
from proximo.records import Prompt, Response, Scored


@runtime_checkable
class RewardSource(Protocol):
    """Gives each response one score, with the named parts that it was made of."""

    name: str
    """Names this source's component in metrics and samples."""

    def score(self, responses: Sequence[Response]) -> list[Scored]:
        """One `Scored` per response, in order. What could not be scored is said so, never given a number."""
        ...


@runtime_checkable
class EagerSource(Protocol):
    """A source that can start on a response while others are still being sampled."""

    def begin(self, response: Response) -> None:
        """Returns at once. `score` is asked about the response later, or never; begin changes no score."""
        ...


@runtime_checkable
class ConcurrentSource(Protocol):
    """A source whose `score` waits for others to do the work, and may be called from a thread of its own."""

    concurrent: bool


@runtime_checkable
class MeasuredSource(Protocol):
    """A source that counts what it does."""

    def statistics(self) -> Mapping[str, MetricValue]:
        """Declared metrics of what was done since they were last asked for."""
        ...


@runtime_checkable
class CheckingSource(Protocol):
    """A source that knows of some prompts beforehand that no answer to them could be graded."""

    def check_prompts(self, prompts: Sequence[Prompt], origins: Mapping[str, str]) -> None:
        """Raises DataError for such a prompt, with its origin by the prompt's id."""
        ...


@runtime_checkable
class ClosableSource(Protocol):
    """A source that started something which must be ended."""

    def close(self) -> None:
        """End it; nothing is left behind."""
        ...
