"""The protocols of reward sources, how a source is used on several ranks, its counts, and rewards of single tokens.

Only `RewardSource` is required; the other protocols are optional capabilities. Of several ranks rank 0 alone calls a
source, and every rank gets its scores; sources that divide their work, such as reward models, are called on every rank.
`NoReward` is the source of a run that learns from its reference alone (docs/distillation.md).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from proximo.distributed.world import current
from proximo.errors import TrainingError
from proximo.metrics.values import Mean, MetricValue, Quantile, Sum
from proximo.records import Prompt, Response, Scored, ScoreState
from proximo.user_code import user_errors_named
from proximo_verifiers.callables import methods_problem
from proximo_verifiers.grader import GradeCounts

QUANTILES: Mapping[str, float] = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


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


def score_on_ranks(source: RewardSource, responses: Sequence[Response]) -> list[Scored]:
    """The scores of a source, which are the same on every rank. Every rank has to call it."""
    if is_shared(source):
        return source.score(responses)
    return scored_once(lambda: source.score(responses), responses, name=source.name)


def checked_scores(source: RewardSource, responses: Sequence[Response]) -> list[Scored]:
    """Scores of these responses as Python numbers. Every rank calls it and gets the same scores.

    Raises TrainingError if a user-defined source raises, or does not return one `Scored` per response, in order.
    """
    what = f"reward source {source.name!r}"
    if type(source).__module__.startswith("proximo."):
        return score_on_ranks(source, responses)
    if is_shared(source):
        return _asked(source, responses, what)
    return scored_once(lambda: _asked(source, responses, what), responses, name=source.name)


def _asked(source: RewardSource, responses: Sequence[Response], what: str) -> list[Scored]:
    with user_errors_named(what, source.score):
        scored = source.score(responses)
    if not is_list(scored) or len(scored) != len(responses):
        came = len(scored) if is_list(scored) else f"a {type(scored).__name__}"
        raise TrainingError(
            f"{what} must return a list with one Scored for each of {len(responses)} responses, it returned {came}"
        )
    return [_checked(each, response, what) for each, response in zip(scored, responses, strict=True)]


def _checked(each: Any, response: Response, what: str) -> Scored:
    if not isinstance(each, Scored):
        raise TrainingError(
            f"{what} must return Scored(response=response, score=...) for each response, it returned {each!r:.60}; a "
            "plain function may return numbers"
        )
    if _identity(each.response) != _identity(response):
        raise TrainingError(
            f"{what} returned its scores in another order than the responses: prompt {response.prompt.id!r}, sample "
            f"{response.sample_index}, got prompt {each.response.prompt.id!r}, sample {each.response.sample_index}"
        )
    try:
        number = as_number(each.score)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TrainingError(f"{what} must give each response a number as its score, got {each.score!r:.60}") from error
    if each.valid and not math.isfinite(number):
        reason = each.reason or f"{what} gave {each.score}"
        return replace(each, score=math.nan, state=ScoreState.INFRASTRUCTURE_FAULT, reason=reason)
    return each if type(each.score) is float else replace(each, score=number)


def _identity(response: Response) -> tuple[str, int, tuple[int, ...]]:
    return response.prompt.id, response.sample_index, tuple(response.token_ids)


def is_shared(source: RewardSource) -> bool:
    """Whether every rank calls the source."""
    return isinstance(source, SharedSource) and source.on_all_ranks


def scored_once(run: Callable[[], list[Scored]], responses: Sequence[Response], *, name: str) -> list[Scored]:
    """The result of `run`, which scores `responses` on rank 0 alone, on every rank."""
    if current().size == 1:
        return run()
    kept: list[Scored] = []
    nothing: Any = None

    def effect() -> list[Scored]:
        """Without the responses, which all ranks have, but those that the source changed."""
        kept[:] = run()
        return [
            replace(each, response=nothing) if each.response is response else each
            for each, response in zip(kept, responses, strict=True)
        ]

    sent = current().on_rank_0(effect, what=f"scores of {name}")
    return kept or [
        replace(each, response=response) if each.response is None else each
        for each, response in zip(sent, responses, strict=True)
    ]


@dataclass(kw_only=True, slots=True)
class AbsentSource:
    """The placeholder on other ranks for a source that was built on rank 0 with its processes and connections."""

    name: str
    concurrent: bool
    is_eager: bool

    def score(self, responses: Sequence[Response]) -> list[Scored]:
        """Never called: rank 0 scores for all ranks."""
        raise AssertionError(f"{self.name} scores {len(responses)} responses on rank 0")

    def begin(self, response: Response) -> None:
        """Never called: rank 0 begins the scoring of all responses."""
        raise AssertionError(f"{self.name} begins response {response.sample_index} on rank 0")


def build_on_first(build: Callable[[], RewardSource], *, name: str) -> RewardSource:
    """Build a source on rank 0 alone. Every rank has to call it; other ranks get an `AbsentSource`."""
    if current().size == 1:
        return build()
    built: list[RewardSource] = []

    def effect() -> AbsentSource:
        built.append(build())
        (source,) = built
        concurrent = isinstance(source, ConcurrentSource) and source.concurrent
        return AbsentSource(name=source.name, concurrent=concurrent, is_eager=is_eager(source))

    absent = current().on_rank_0(effect, what=f"the start of {name}")
    return built[0] if built else absent


def grade_metrics(counts: GradeCounts, name: str) -> dict[str, MetricValue]:
    """The declared metrics of the source `name`, empty if nothing was scored.

    Fractions are of all responses that were to be scored.
    """
    if not counts.num_responses:
        return {}
    fractions = {
        "timeout_fraction": counts.num_timeouts,
        "failure_fraction": counts.num_failures,
        "model_fault_fraction": counts.num_model_faults,
        "cache_hit_fraction": counts.num_cache_hits,
    }
    values: dict[str, MetricValue] = {key: Mean(count, counts.num_responses) for key, count in fractions.items()}
    values |= _percentiles(counts.seconds)
    values |= {"retries": Sum(counts.num_retries), "worker_restarts": Sum(counts.num_restarts)}
    return {f"source/{name}/{key}": value for key, value in values.items()}


@dataclass(kw_only=True)
class BatchStatistics:
    """Counts of a source that scores a batch in one call, without retries."""

    num_responses: int = 0
    num_failures: int = 0
    seconds: list[float] = field(default_factory=list)
    """Time of each batch."""

    def count(self, scored: Sequence[Scored], seconds: float) -> None:
        """Counts a batch that was scored in `seconds`; ignores an empty one."""
        if scored:
            self.num_responses += len(scored)
            self.num_failures += sum(item.state is ScoreState.INFRASTRUCTURE_FAULT for item in scored)
            self.seconds.append(seconds)

    def taken(self, name: str) -> dict[str, MetricValue]:
        """The declared metrics of the source `name`, empty if nothing was scored. Resets the counts."""
        if not self.num_responses:
            return {}
        failures: dict[str, MetricValue] = {"failure_fraction": Mean(self.num_failures, self.num_responses)}
        values = failures | _percentiles(self.seconds)
        self.num_responses, self.num_failures, self.seconds = 0, 0, []
        return {f"source/{name}/{key}": value for key, value in values.items()}


def _percentiles(seconds: Sequence[float]) -> dict[str, MetricValue]:
    return {f"seconds_{key}": Quantile(share, tuple(seconds)) for key, share in QUANTILES.items()}


def statistics_of(source: RewardSource | None) -> dict[str, MetricValue]:
    """The metrics of a source since the last call; empty for a source without metrics. On ranks, those of rank 0."""
    if source is None:
        return {}
    return current().on_rank_0(
        lambda: dict(source.statistics()) if isinstance(source, MeasuredSource) else {},
        what=f"statistics of {source.name}",
    )


def scored_by_token(
    response: Response, rewards: Any, *, name: str, components: Mapping[str, float] | None = None
) -> Scored:
    """The response with a reward for each of its tokens. Its score is their sum.

    `rewards` is a sequence (list, array, tensor) with one number per token, or a mapping from token index to number; a
    missing index means 0. A None or a number that is not finite leaves the response without a score. `name` is the name
    of the source. Raises TrainingError for anything else.
    """
    numbers = _numbers(rewards, len(response.token_ids), name=name)
    if not all(math.isfinite(number) for number in numbers):
        reason = f"{name} gave a token a reward that is not a finite number"
        return Scored(response=response, score=math.nan, state=ScoreState.INFRASTRUCTURE_FAULT, reason=reason)
    return Scored(response=response, score=math.fsum(numbers), components=components or {}, token_rewards=numbers)


def scored_by_prefix(response: Response, prefix_scores: Sequence[float], *, name: str) -> Scored:
    """The response with scores of each of its prefixes.

    `prefix_scores` are the score of the prompt alone and the scores after each token, so one more than there are
    tokens. The last is the score of the response.
    """
    if not all(math.isfinite(score) for score in prefix_scores):
        reason = f"{name} gave a part of the response a score that is not a finite number"
        return Scored(response=response, score=math.nan, state=ScoreState.INFRASTRUCTURE_FAULT, reason=reason)
    return Scored(response=response, score=prefix_scores[-1], prefix_scores=tuple(prefix_scores))


def weighted_sum(parts: Sequence[tuple[float, Sequence[float] | None]]) -> tuple[float, ...] | None:
    """The weighted sum per token over the sources that have per-token numbers; None if no source has them."""
    rows = [[weight * number for number in numbers] for weight, numbers in parts if numbers]
    return tuple(math.fsum(column) for column in zip(*rows, strict=True)) if rows else None


def _numbers(rewards: Any, num_tokens: int, *, name: str) -> tuple[float, ...]:
    if hasattr(rewards, "tolist"):  # numpy arrays and tensors
        rewards = rewards.tolist()
    try:
        if isinstance(rewards, Mapping):
            by_index = {int(index): as_number(number) for index, number in rewards.items()}
            if all(0 <= index < num_tokens for index in by_index):
                return tuple(by_index.get(index, 0.0) for index in range(num_tokens))
        elif is_list(rewards) and len(rewards) == num_tokens:
            return tuple(as_number(number) for number in rewards)
    except (TypeError, ValueError):
        pass  # reported below
    raise TrainingError(
        f"token_rewards of {name!r} must be one number for each of the {num_tokens} tokens of the response "
        f"(metadata['token_ids']), or a mapping from indices 0 to {num_tokens - 1} to numbers; got {rewards!r:.80}"
    )


def is_list(value: Any) -> bool:
    """True for a sequence of values. Text and bytes are single values here, although Python calls them sequences."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def as_number(value: Any) -> float:
    """The value as a float, NaN for None.

    Raises TypeError for text, which `float` would parse, and for anything that is not a number; ValueError for an
    integer beyond the range of floats.
    """
    if isinstance(value, str | bytes | bytearray):
        raise TypeError(f"expected a number, got {value!r:.80}")
    if hasattr(value, "detach"):  # float() of a tensor that requires a gradient warns
        value = value.detach()
    try:
        return math.nan if value is None else float(value)
    except OverflowError as error:
        raise ValueError("a number beyond 1.8e308") from error
