"""Scores responses with several reward sources concurrently."""

import queue
import threading
from collections.abc import Sequence

from proximo.records import Response, Scored
from proximo.rewards.source import ConcurrentSource, RewardSource

MAX_CONCURRENT = 8
"""Largest number of sources scored in threads at a time, in addition to one in the caller's thread."""

_Answer = tuple[int, list[Scored] | None, BaseException | None]


def score_concurrently(sources: Sequence[RewardSource], responses: Sequence[Response]) -> list[list[Scored]]:
    """The scores of all responses by each source, in the order of the sources.

    Concurrent sources, which wait for other processes, run in threads. The others compute in this process and may use
    the device, so they run one after another in the caller's thread. Raises the first exception of a source; the
    remaining sources end at their own limits.
    """
    if len(sources) == 1:
        return [sources[0].score(responses)]
    answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
    threaded = [i for i, source in enumerate(sources) if isinstance(source, ConcurrentSource) and source.concurrent]
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in threaded:
        waiting.put(index)

    def work() -> None:
        while True:
            try:
                index = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                answers.put((index, sources[index].score(responses), None))
            except BaseException as error:  # raised again in the caller's thread
                answers.put((index, None, error))

    for _ in threaded[:MAX_CONCURRENT]:
        threading.Thread(target=work, daemon=True, name="reward-sources").start()
    scores = {i: source.score(responses) for i, source in enumerate(sources) if i not in threaded}
    for _ in threaded:
        index, scored, error = answers.get()  # needs no timeout: each source has its own limit
        if error is not None or scored is None:
            raise error or AssertionError("a source returned no scores")
        scores[index] = scored
    return [scores[index] for index in range(len(sources))]
