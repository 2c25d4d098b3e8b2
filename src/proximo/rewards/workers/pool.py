"""Worker processes that can be killed, as their callers see them: hand work in, wait for it, close. Not how it is run.

No wait is without a deadline, and one that takes long says in the log what is waited for.
"""

import atexit
import threading
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Self

from proximo.errors import TrainingError
from proximo.rewards.progress_log import TELL_EVERY_SECONDS, tell, telling_of_start
from proximo.rewards.workers.folders import sweep_folders
from proximo.rewards.workers.loop import START_SECONDS, PoolLimits, WorkerLoop
from proximo.rewards.workers.outcomes import Failed, Outcome, TimedOut, Work
from proximo.rewards.workers.process import Job

CLOSE_SECONDS = 30.0
"""For the kernel to end processes that were killed."""


class WorkerPool:
    """`num_workers` processes that do one kind of job. Everything they do ends with `close`, or with this process."""

    def __init__(self, job: Job, limits: PoolLimits, *, name: str) -> None:
        """Starts them and waits for the first. `name` stands in messages.

        Raises what a worker met when it made its verifier (ConfigError, MissingExtraError, SandboxError), TrainingError
        where it died of it.
        """
        self.name = name
        self._answer_seconds = limits.answer_seconds
        sweep_folders()
        self._loop = WorkerLoop(job, limits)
        self._thread = threading.Thread(target=self._loop.run, daemon=True, name=f"workers-{name}")
        self._thread.start()
        atexit.register(self.close)
        with telling_of_start(name, "its first worker"):
            decided = self._loop.decided.wait(START_SECONDS + 10)
        error = self._loop.start_error
        if error is None and not (decided and self._thread.is_alive()):
            error = TrainingError("no worker got ready")
        if error is not None:
            self.close()
            raise type(error)(f"reward source {name!r}: {error}")

    @property
    def about(self) -> Any:
        """What a worker said of itself when it was ready."""
        return self._loop.about

    @property
    def num_restarts(self) -> int:
        """Workers that were started in the place of one that ended."""
        return self._loop.num_restarts

    @property
    def num_retries(self) -> int:
        """Tries beyond the first."""
        return self._loop.num_retries

    def submit(self, requests: Iterable[bytes]) -> list[Work]:
        """Begin with these encoded requests, in this order. Returns at once."""
        work = [Work(request=request) for request in requests]
        self._loop.submit(work)
        return work

    def wait(self, work: Sequence[Work], *, seconds: float, limit: str) -> list[Outcome]:
        """What became of each, in order, after at most `seconds`; what is not done then is given up.

        What took longer than its own limit before then, or gave up its turn, has timed out; only the rest has failed.
        `limit` names the setting that `seconds` came from.
        """
        start = time.monotonic()
        told = start
        for each in work:
            while not each.done.is_set():
                now = time.monotonic()
                if now >= start + seconds:
                    break
                if not self._thread.is_alive():
                    raise TrainingError(f"reward source {self.name!r}: its workers are gone")
                if now >= told + TELL_EVERY_SECONDS:
                    told = now
                    tell(self.name, sum(one.done.is_set() for one in work), len(work), now - start)
                each.done.wait(min(start + seconds, told + TELL_EVERY_SECONDS) - now)
        late = Failed(reason=f"not graded within {limit} = {seconds:g}")
        if not all(each.done.is_set() for each in work):
            for each in work:
                timed_out = TimedOut(seconds=self._answer_seconds, times=each.timeouts)
                each.finish(timed_out if each.timeouts or each.is_postponed else late)
            self._loop.discard_finished()
        return [each.outcome or late for each in work]

    def close(self) -> None:
        """End every worker and whatever it started."""
        atexit.unregister(self.close)
        self._loop.closing.set()
        self._loop.wakeup.wake()
        self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._loop.wakeup.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()
