"""Several sources asked at once. Not their sum: that is weighted.py."""

import queue
import threading
from collections.abc import Sequence

from proximo.records import Response, Scored
from proximo.rewards.source import ConcurrentSource, RewardSource

MAX_CONCURRENT = 8
"""Sources that are asked at a time, beside the one in the caller's thread."""

_Answer = tuple[int, list[Scored] | None, BaseException | None]


def score_beside_each_other(sources: Sequence[RewardSource], responses: Sequence[Response]) -> list[list[Scored]]:
    """What each source says of all responses, in the order of the sources.

    Sources that wait for others to do the work are asked from threads; the rest, which compute here and may use the
    device, one after another in the caller's. Raises what a source raised, the first one to do so, and leaves the
    others to their own limits.
    """
    if len(sources) == 1:
        return [sources[0].score(responses)]
    answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
    apart = [i for i, source in enumerate(sources) if isinstance(source, ConcurrentSource) and source.concurrent]
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in apart:
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

    for _ in apart[:MAX_CONCURRENT]:
        threading.Thread(target=work, daemon=True, name="reward-sources").start()
    found = {i: source.score(responses) for i, source in enumerate(sources) if i not in apart}
    for _ in apart:
        index, scored, error = answers.get()  # each source has a limit of its own
        if error is not None or scored is None:
            raise error or AssertionError("a source gave nothing")
        found[index] = scored
    return [found[index] for index in range(len(sources))]
