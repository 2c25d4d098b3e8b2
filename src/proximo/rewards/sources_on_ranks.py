"""Reward sources on several ranks: rank 0 alone calls a source, and every rank gets its scores.

Sources that divide their work among the ranks, such as reward models, are called on every rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from proximo.distributed.world import current
from proximo.records import Response, Scored
from proximo.rewards.source import ConcurrentSource, RewardSource, SharedSource, is_eager


def score_on_ranks(source: RewardSource, responses: Sequence[Response]) -> list[Scored]:
    """The scores of a source, which are the same on every rank. Every rank has to call it."""
    if is_shared(source):
        return source.score(responses)
    return scored_once(lambda: source.score(responses), responses, name=source.name)


def is_shared(source: RewardSource) -> bool:
    """Whether every rank calls the source."""
    return isinstance(source, SharedSource) and source.on_all_ranks


def scored_once(run: Callable[[], list[Scored]], responses: Sequence[Response], *, name: str) -> list[Scored]:
    """The result of `run`, which scores `responses` on rank 0 alone, on every rank."""
    if current().size == 1:
        return run()
    kept: list[Scored] = []

    def effect() -> list[Any]:
        kept[:] = run()
        return without_responses(kept, responses)

    sent = current().once(effect, what=f"scores of {name}")
    return kept if current().leads else with_responses(sent, responses)


def without_responses(scored: Sequence[Scored], responses: Sequence[Response]) -> list[Any]:
    """Scores to send to ranks that have the responses: a response that the source changed is sent with its score."""
    nothing: Any = None
    return [
        replace(each, response=nothing) if each.response is response else each
        for each, response in zip(scored, responses, strict=True)
    ]


def with_responses(sent: Sequence[Any], responses: Sequence[Response]) -> list[Scored]:
    """The scores that `without_responses` was given."""
    return [
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

    absent = current().once(effect, what=f"the start of {name}")
    return built[0] if built else absent
