"""The weighted sum of several sources, which are called concurrently.

A response that any source could not score has no score; a source that does not apply to it is left out of its sum.
"""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, as_completed
from functools import partial
from typing import Any

from proximo.distributed.world import all_in_background, alone, current
from proximo.errors import ConfigError
from proximo.metrics.values import MetricValue
from proximo.records import Prompt, Response, Scored, ScoreState
from proximo.rewards.function import RewardFunction
from proximo.rewards.source import (
    CheckingSource,
    ClosableSource,
    ConcurrentSource,
    EagerSource,
    MeasuredSource,
    RewardSource,
    is_eager,
    is_list,
    is_shared,
    score_on_ranks,
    scored_once,
    weighted_sum,
)

Part = RewardSource | RewardFunction
Reward = Part | Sequence[Part | tuple[float, Part]]
"""The reward of a program: a function, a source, or several. Sources without a weight have weight 1."""
MAX_CONCURRENT = 8
"""Largest number of sources scored in threads at a time, in addition to one in the caller's thread."""


def as_pairs(reward: Any) -> list[tuple[float, Any]]:
    """The parts of a reward with their weights. The parts are not checked.

    Raises ConfigError for a weight that is not a finite number.
    """
    if isinstance(reward, WeightedReward):
        return list(reward.sources)
    if not is_list(reward):
        return [(1.0, reward)]
    pairs: list[tuple[float, Any]] = []
    for part in reward:
        match part:
            case (bool(), _) | (_,) | ():
                raise ConfigError(_wanted(part))
            case (int() | float() as weight, source) if math.isfinite(weight):
                pairs.append((float(weight), source))
            case (_, *_):
                raise ConfigError(_wanted(part))
            case source:
                pairs.append((1.0, source))
    return pairs


class WeightedReward:
    """score = sum of weight * score over the sources. The score of each source is a component under its name."""

    name = "weighted"
    on_all_ranks = True

    def __init__(self, sources: Sequence[tuple[float, RewardSource]], *, task: str | None = None) -> None:
        """`sources` are pairs (weight, source). `task`: the source, or its component, without whose judgement a
        response has no score (`ppo.task_reward`).

        Raises ConfigError for an empty list and for anything else than pairs.
        """
        if not is_list(sources) or not sources:
            raise ConfigError(
                "a weighted reward needs a list with at least one pair (weight, source), got "
                f"{'none' if is_list(sources) else type(sources).__name__}"
            )
        for pair in sources:
            _check_pair(pair)
        self.sources = tuple(sources)
        self.task = task

    @property
    def is_eager(self) -> bool:
        """Whether one of the sources is an `EagerSource`."""
        return any(is_eager(source) for _, source in self.sources)

    def begin(self, response: Response) -> None:
        """Starts the response on every source that is an `EagerSource`."""
        for _, source in self.sources:
            if isinstance(source, EagerSource):
                source.begin(response)

    def score(self, responses: Sequence[Response]) -> list[Scored]:
        """The weighted sum for each response, in order."""
        answers = score_concurrently([source for _, source in self.sources], responses)
        return [
            self._sum(response, parts) for response, parts in zip(responses, zip(*answers, strict=True), strict=True)
        ]

    def check_prompts(self, prompts: Sequence[Prompt], origins: Mapping[str, str]) -> None:
        """Checks the prompts by every source that can. Raises the DataError of the first source that refuses one."""
        for _, source in self.sources:
            if isinstance(source, CheckingSource):
                source.check_prompts(prompts, origins)

    def statistics(self) -> dict[str, MetricValue]:
        """The metrics of all sources that have some."""
        counting = [source for _, source in self.sources if isinstance(source, MeasuredSource)]
        return {name: value for source in counting for name, value in source.statistics().items()}

    def close(self) -> None:
        """Closes every source that can be closed."""
        for _, source in self.sources:
            if isinstance(source, ClosableSource):
                source.close()

    def _sum(self, response: Response, parts: Sequence[Scored]) -> Scored:
        named = list(zip(self.sources, parts, strict=True))
        judging = [(weight, source, part) for (weight, source), part in named if _applies(part)]
        components: dict[str, float] = {}
        for _, source, part in judging:
            components[source.name] = part.score
            components |= {f"{source.name}.{key}": value for key, value in part.components.items()}
        worst = max((part.state for _, _, part in judging), key=_severity, default=ScoreState.NOT_APPLICABLE)
        if worst.has_score and any(self._is_task(source) and not _applies(part) for (_, source), part in named):
            worst = ScoreState.NOT_APPLICABLE
        weighed = [(weight, part) for weight, _, part in judging] if worst.has_score else []
        reasons = [part.reason for part in parts if part.reason]
        return Scored(
            response=response,
            score=sum(weight * part.score for weight, part in weighed) if worst.has_score else math.nan,
            components=components,
            state=worst,
            reason="; ".join(reasons) or None,
            token_rewards=weighted_sum([(weight, part.token_rewards) for weight, part in weighed]),
            prefix_scores=weighted_sum([(weight, part.prefix_scores) for weight, part in weighed]),
        )

    def _is_task(self, source: RewardSource) -> bool:
        return self.task is not None and (self.task == source.name or self.task.startswith(f"{source.name}."))


def _applies(part: Scored) -> bool:
    return part.state is not ScoreState.NOT_APPLICABLE


def _check_pair(pair: Any) -> None:
    match pair:
        case (int() | float() as weight, source) if math.isfinite(weight) and isinstance(source, RewardSource):
            return
    raise ConfigError(_wanted(pair))


def _wanted(pair: Any) -> str:
    return (
        "a weighted reward needs pairs (weight, source), such as (0.5, FunctionReward(mine, name='mine')); "
        f"got {pair!r:.80}"
    )


def _severity(state: ScoreState) -> int:
    return list(ScoreState).index(state)


def score_concurrently(sources: Sequence[RewardSource], responses: Sequence[Response]) -> list[list[Scored]]:
    """The scores of all responses by each source, in the order of the sources.

    Concurrent sources, which wait for other processes, run in threads. The others compute in this process and may use
    the device, so they run one after another in the caller's thread. Raises the first exception of a source; the
    remaining sources end at their own limits.

    On several ranks concurrent sources run on rank 0, and every rank gets all scores (source.py). Ranks meet
    in the caller's thread only.
    """
    if len(sources) == 1:
        return [score_on_ranks(sources[0], responses)]
    threaded = [source for source in sources if _is_concurrent(source)]
    works = [partial(_score_alone, source, responses) for source in threaded if current().leads]
    answers = all_in_background(works, at_once=MAX_CONCURRENT, name="reward-sources")
    scores = {id(source): score_on_ranks(source, responses) for source in sources if not _is_concurrent(source)}
    for number, source in enumerate(threaded):
        scores[id(source)] = scored_once(lambda n=number: _all_of(answers)[n], responses, name=source.name)
    return [scores[id(source)] for source in sources]


def _is_concurrent(source: RewardSource) -> bool:
    return isinstance(source, ConcurrentSource) and source.concurrent and not is_shared(source)


def _all_of(answers: Sequence[Future[list[Scored]]]) -> list[list[Scored]]:
    """All answers, in order. Raises the first exception."""
    for answer in as_completed(answers):  # without a time limit: sources of recipes have their own
        answer.result()
    return [answer.result() for answer in answers]


def _score_alone(source: RewardSource, responses: Sequence[Response]) -> list[Scored]:
    with alone():
        return source.score(responses)
