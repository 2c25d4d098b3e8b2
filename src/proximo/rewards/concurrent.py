"""Scores responses with several reward sources concurrently."""

import queue
import threading
from collections.abc import Sequence
from typing import Any

from proximo.distributed.world import alone, current
from proximo.records import Response, Scored
from proximo.rewards.source import ConcurrentSource, RewardSource
from proximo.rewards.sources_on_ranks import is_shared, score_on_ranks, with_responses, without_responses

MAX_CONCURRENT = 8
"""Largest number of sources scored in threads at a time, in addition to one in the caller's thread."""

_Answer = tuple[int, list[Scored] | None, BaseException | None]


def score_concurrently(sources: Sequence[RewardSource], responses: Sequence[Response]) -> list[list[Scored]]:
    """The scores of all responses by each source, in the order of the sources.

    Concurrent sources, which wait for other processes, run in threads. The others compute in this process and may use
    the device, so they run one after another in the caller's thread. Raises the first exception of a source; the
    remaining sources end at their own limits.

    On several ranks concurrent sources run on rank 0, and every rank gets all scores (sources_on_ranks.py). Ranks meet
    in the caller's thread only.
    """
    if len(sources) == 1:
        return [score_on_ranks(sources[0], responses)]
    world = current()
    threaded = {i: source for i, source in enumerate(sources) if _is_concurrent(source)}
    answers = _start(threaded if world.leads else {}, responses)
    scores = {i: score_on_ranks(source, responses) for i, source in enumerate(sources) if i not in threaded}
    if world.size == 1:
        scores |= _collect(answers, len(threaded))
    elif threaded:
        kept: dict[int, list[Scored]] = {}

        def collect() -> dict[int, list[Any]]:
            kept.update(_collect(answers, len(threaded)))
            return {i: without_responses(scored, responses) for i, scored in kept.items()}

        names = ", ".join(source.name for source in threaded.values())
        sent = world.once(collect, what=f"scores of {names}")
        scores |= kept or {i: with_responses(each, responses) for i, each in sent.items()}
    return [scores[index] for index in range(len(sources))]


def _is_concurrent(source: RewardSource) -> bool:
    return isinstance(source, ConcurrentSource) and source.concurrent and not is_shared(source)


def _start(sources: dict[int, RewardSource], responses: Sequence[Response]) -> "queue.SimpleQueue[_Answer]":
    """Score with each source in threads. Returns the queue of their answers."""
    answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in sources:
        waiting.put(index)

    def work() -> None:
        while True:
            try:
                index = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                with alone():
                    answers.put((index, sources[index].score(responses), None))
            except BaseException as error:  # raised again in the caller's thread
                answers.put((index, None, error))

    for _ in list(sources)[:MAX_CONCURRENT]:
        threading.Thread(target=work, daemon=True, name="reward-sources").start()
    return answers


def _collect(answers: "queue.SimpleQueue[_Answer]", count: int) -> dict[int, list[Scored]]:
    """The scores of `count` sources by their index. Raises the first exception."""
    scores: dict[int, list[Scored]] = {}
    for _ in range(count):
        index, scored, error = answers.get()  # needs no timeout: each source has its own limit
        if error is not None or scored is None:
            raise error or AssertionError("a source returned no scores")
        scores[index] = scored
    return scores
