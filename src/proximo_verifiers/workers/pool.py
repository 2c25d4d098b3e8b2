"""The pool of worker processes: submit work, wait for it, close.

Every wait has a deadline, and a long one is logged.
"""

import atexit
import threading
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Self

from proximo_verifiers.errors import WorkersError
from proximo_verifiers.progress_log import LOG_EVERY_SECONDS, log_progress, logging_start
from proximo_verifiers.workers.loop import START_SECONDS, PoolLimits, WorkerLoop
from proximo_verifiers.workers.process import WorkerSpec, sweep_folders
from proximo_verifiers.workers.work import Failed, TimedOut, Work, WorkResult

CLOSE_SECONDS = 30.0
"""Time for the kernel to end killed processes."""


class WorkerPool:
    """Worker processes of one kind. They end with `close`, or with this process."""

    def __init__(self, spec: WorkerSpec, limits: PoolLimits, *, name: str) -> None:
        """Starts the workers and waits until the first is ready. `name` is used in messages.

        Raises the error of a worker that could not make its verifier (ConfigError, MissingExtraError, SandboxError),
        and WorkersError if it died.
        """
        self.name = name
        self._answer_seconds = limits.answer_seconds
        sweep_folders()
        self._loop = WorkerLoop(spec, limits)
        self._thread = threading.Thread(target=self._loop.run, daemon=True, name=f"workers-{name}")
        self._thread.start()
        atexit.register(self.close)
        with logging_start(f"reward source {name}", "its first worker"):
            decided = self._loop.decided.wait(START_SECONDS + 10)
        error = self._loop.start_error
        if error is None and not (decided and self._thread.is_alive()):
            error = WorkersError("no worker became ready")
        if error is not None:
            self.close()
            raise type(error)(f"reward source {name!r}: {error}")

    @property
    def about(self) -> Any:
        """The value that a worker sent when it became ready: the grade of a time-out, or None."""
        return self._loop.about

    @property
    def num_restarts(self) -> int:
        """Number of workers that replaced one that ended."""
        return self._loop.num_restarts

    @property
    def num_retries(self) -> int:
        """Number of attempts beyond the first of each work."""
        return self._loop.num_retries

    def submit(self, requests: Iterable[bytes]) -> list[Work]:
        """Queues encoded requests in this order. Returns at once."""
        work = [Work(request=request) for request in requests]
        self._loop.submit(work)
        return work

    def wait(self, work: Sequence[Work], *, seconds: float, limit: str) -> list[WorkResult]:
        """The result of each work, in order, within `seconds`. Unfinished work is given up then.

        Unfinished work has timed out if it exceeded its own limit before or gave up its turn; the rest has failed.
        `limit` names the setting of `seconds`, for messages.
        """
        self._loop.want(work)
        start = time.monotonic()
        logged = start
        for item in work:
            while not item.done.is_set():
                now = time.monotonic()
                if now >= start + seconds:
                    break
                if not self._thread.is_alive():
                    raise WorkersError(f"reward source {self.name!r}: its workers have ended")
                if now >= logged + LOG_EVERY_SECONDS:
                    logged = now
                    log_progress(self.name, sum(other.done.is_set() for other in work), len(work), now - start)
                item.done.wait(min(start + seconds, logged + LOG_EVERY_SECONDS) - now)
        late = Failed(reason=f"not graded within {limit} = {seconds:g}")
        if not all(item.done.is_set() for item in work):
            for item in work:
                timed_out = TimedOut(seconds=self._answer_seconds, times=item.timeouts)
                item.finish(timed_out if item.timeouts or item.is_postponed else late)
            self._loop.discard_finished()
        return [item.outcome or late for item in work]

    def close(self) -> None:
        """Ends every worker and every process that it started."""
        atexit.unregister(self.close)
        self._loop.closing.set()
        self._loop.wake()
        self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()
