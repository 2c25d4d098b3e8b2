"""The thread that runs a worker pool. It alone touches the workers.

Each round first reads what the workers sent and then checks deadlines, so that a reply which has arrived is never
treated as late. Quick work is handed out a few pieces ahead. A worker replies to each piece before it begins the next,
so the piece it is working on is always the first of those it holds. The loop therefore knows which piece hung or killed
its worker: that piece is retried, and the others return to the queue as if they had never been sent.
"""

import selectors
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from proximo_verifiers import errors
from proximo_verifiers.errors import VerifierError, WorkersError
from proximo_verifiers.workers.frames import FrameDecoder, encode
from proximo_verifiers.workers.process import WorkerProcess, WorkerSpec
from proximo_verifiers.workers.work import Done, Failed, TimedOut, Work, WorkQueue, backoff_seconds

START_SECONDS = 120.0
"""Time for a worker to become ready. Importing sympy or torch takes seconds on a busy machine."""
MAX_FAILED_STARTS = 5
"""After this many failed starts in a row, with no worker left, all work fails."""
AHEAD_SECONDS = 0.02
"""Amount of work, by its mean time, that a worker holds beyond the current piece."""
MAX_AHEAD = 64
LOOK_EVERY_SECONDS = 0.25
"""Interval of checks whether a silent worker is alive. A process that it started may keep its pipe open."""
CLOSE_SECONDS = 10.0
"""Time for a verifier to end what it started. Only one that hangs takes it all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolLimits:
    """Number of workers, time limit and attempts."""

    num_workers: int
    answer_seconds: float
    """Wall-clock limit of one piece of work; exceeded twice, it is `TimedOut`."""
    attempts: int
    """Number of times work is tried whose worker died or raised, before it has `Failed`."""


class WorkerLoop:
    """Runs until `closing` is set, then leaves no process behind."""

    def __init__(self, spec: WorkerSpec, limits: PoolLimits) -> None:
        self.spec = spec
        self.limits = limits
        self.closing = threading.Event()
        self.decided = threading.Event()
        """Set once a worker is ready, or could not be started."""
        self.start_error: VerifierError | None = None
        """The error of the last failed start; None once a start has succeeded."""
        self.about: Any = None
        """The value that a worker sent when it became ready."""
        self.num_restarts = 0
        self.num_retries = 0
        self._queue = WorkQueue()
        self._given_up = threading.Event()
        self._wakeup, self._waker = socket.socketpair()
        self._waking = threading.Lock()
        for end in (self._wakeup, self._waker):
            end.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._workers: list[WorkerProcess] = []
        self._writing: dict[int, WorkerProcess] = {}
        self._failed_starts = 0
        self._next_start_time = 0.0
        self._mean_seconds = AHEAD_SECONDS

    def submit(self, work: Sequence[Work]) -> None:
        """Queues work. May be called from any thread."""
        self._queue.submit(work)
        self.wake()

    def want(self, work: Sequence[Work]) -> None:
        """Puts work first, because somebody waits for it. May be called from any thread."""
        self._queue.want(work)
        self.wake()

    def discard_finished(self) -> None:
        """Restarts workers that hold work which a caller has finished itself. May be called from any thread."""
        self._given_up.set()
        self.wake()

    def wake(self) -> None:
        """Wakes the pool's thread. May be called from any thread, also after `close`."""
        with self._waking, suppress(OSError):  # it is awake already, or closed
            self._waker.send(b"!")

    def close(self) -> None:
        """To be called when the pool's thread has ended. The system may reuse the descriptors then."""
        with self._waking:
            self._waker.close()
            self._wakeup.close()

    def run(self) -> None:
        """Runs the pool until `closing` is set. To be called in the pool's thread."""
        try:
            while not self.closing.is_set():
                self._start_workers()
                self._queue.admit()
                self._dispatch()
                ready = self._selector.select(self._pause())
                for key, events in ready:
                    self._on_event(key, events)
                self._check_workers(check_alive=not ready)
        finally:
            self.closing.set()
            self._shut_down()
            self._fail_all("the workers were closed")
            self.decided.set()
            self._selector.close()

    def _shut_down(self) -> None:
        """Gives idle workers time to close their verifiers, then kills all that are left."""
        for worker in self._workers:
            worker.dismiss()
        deadline = time.monotonic() + CLOSE_SECONDS
        while any(worker.is_ready and not worker.in_flight and not worker.has_died() for worker in self._workers):
            if time.monotonic() > deadline:
                break
            time.sleep(0.005)
        for worker in self._workers:
            worker.kill()

    def _start_workers(self) -> None:
        """Starts missing workers, with a pause after failed starts."""
        while len(self._workers) < self.limits.num_workers and time.monotonic() >= self._next_start_time:
            try:
                worker = WorkerProcess(self.spec)
            except OSError as error:
                self._start_failed(WorkersError(f"no worker process can be started: {error}"))
                return
            self._workers.append(worker)
            self._selector.register(worker.replies, selectors.EVENT_READ, worker)
            self._write(worker)

    def _start_failed(self, error: VerifierError) -> None:
        self._failed_starts += 1
        self._next_start_time = time.monotonic() + backoff_seconds(self._failed_starts)
        self.start_error = error
        self.decided.set()
        if self._failed_starts >= MAX_FAILED_STARTS and not any(worker.is_ready for worker in self._workers):
            self._fail_all(f"no worker could be started: {error}")

    def _fail_all(self, reason: str) -> None:
        self._queue.fail_all(reason)
        for worker in self._workers:
            for work in worker.in_flight:
                work.finish(Failed(reason=reason))

    def _dispatch(self) -> None:
        """Sends work to the workers that hold least. Quick work is sent ahead, so that no worker waits for its next."""
        ahead = max(1, min(MAX_AHEAD, int(AHEAD_SECONDS / self._mean_seconds)))
        ready = [worker for worker in self._workers if worker.is_ready and not worker.is_reserved]
        while ready:
            worker = min(ready, key=lambda candidate: len(candidate.in_flight))
            if len(worker.in_flight) >= ahead or (work := self._queue.next()) is None:
                break
            self._send(worker, work)
        for worker in ready:
            if not worker.in_flight and (work := self._queue.next_isolated()) is not None:
                worker.is_reserved = True
                self._send(worker, work)
        for worker in self._workers:
            self._write(worker)

    def _send(self, worker: WorkerProcess, work: Work) -> None:
        if not worker.in_flight:
            worker.head_started = time.monotonic()
        worker.in_flight.append(work)
        worker.send(work.request)

    def _write(self, worker: WorkerProcess) -> None:
        """Writes what the pipe takes now, and registers the worker for the rest."""
        worker.write()
        pending, known = worker.has_unsent, worker.requests in self._writing
        if pending and not known:
            self._writing[worker.requests] = worker
            self._selector.register(worker.requests, selectors.EVENT_WRITE, worker)
        elif known and not pending:
            del self._writing[worker.requests]
            self._selector.unregister(worker.requests)

    def _on_event(self, key: selectors.SelectorKey, events: int) -> None:
        worker = key.data
        if worker is None:
            with suppress(BlockingIOError):
                while self._wakeup.recv(4096):
                    pass
        elif worker not in self._workers:  # reaped earlier in this round
            return
        elif events & selectors.EVENT_WRITE:
            self._write(worker)
        else:
            self._read_replies(worker)

    def _read_replies(self, worker: WorkerProcess) -> None:
        try:
            messages = worker.read()
            if messages is None:
                self._reap(worker, None)
                return
            for message in messages:
                if worker in self._workers:
                    self._on_message(worker, message)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            self._reap(worker, f"sent an invalid reply ({type(error).__name__}: {error})")

    def _on_message(self, worker: WorkerProcess, message: Any) -> None:
        if not worker.is_ready:
            if "failed" in message:
                worker.start_error = reported_error(message["failed"], message["message"])
                self._reap(worker, None)
                return
            self.about = message["ready"]
            worker.is_ready = True
            worker.head_started = time.monotonic()
            self._failed_starts, self.start_error = 0, None
            self.decided.set()
            return
        if "postponed" in message:
            self._postpone(worker.in_flight.popleft())
        elif "raised" not in message:
            seconds = min(self.limits.answer_seconds, max(0.0, float(message["seconds"])))
            done = Done(value=message["value"], seconds=seconds)
            self._mean_seconds += 0.05 * (max(seconds, 1e-6) - self._mean_seconds)
            worker.in_flight.popleft().finish(done)
        else:
            self._retry(worker.in_flight.popleft(), str(message["raised"]))
        worker.is_reserved = False
        worker.head_started = time.monotonic()
        if message.get("leaving"):
            self._reap(worker, None, blame=False)

    def _postpone(self, work: Work) -> None:
        """Queues work behind everything else, marked as having had its first turn."""
        (request,) = FrameDecoder().feed(work.request)
        work.request = encode(request | {"postponed": True})
        work.is_postponed = True
        self._queue.put_isolated(work)

    def _check_workers(self, *, check_alive: bool) -> None:
        """Enforces deadlines and, with `check_alive`, finds workers that died silently."""
        now = time.monotonic()
        given_up = self._given_up.is_set()
        self._given_up.clear()
        for worker in tuple(self._workers):
            if given_up and any(work.outcome is not None for work in worker.in_flight):
                self._reap(worker, None, blame=False)
            elif not worker.is_ready and now > worker.head_started + START_SECONDS:
                self._reap(worker, f"was not ready within {START_SECONDS:g} seconds")
            elif worker.in_flight and now > worker.head_started + self.limits.answer_seconds:
                self._time_out(worker)
            elif check_alive and worker.has_died():
                self._read_replies(worker)  # its last message may be a reply
                if worker in self._workers:
                    self._reap(worker, None)

    def _time_out(self, worker: WorkerProcess) -> None:
        work = worker.in_flight.popleft()
        self._reap(worker, None, blame=False)
        work.timeouts += 1
        if work.timeouts > 1:
            work.finish(TimedOut(seconds=self.limits.answer_seconds))
        else:
            self.num_retries += 1
            self._queue.put_isolated(work)

    def _reap(self, worker: WorkerProcess, reason: str | None, *, blame: bool = True) -> None:
        """Ends a worker. Its current work counts as failed once more, if `blame` is set."""
        self._workers.remove(worker)
        self._selector.unregister(worker.replies)
        if self._writing.pop(worker.requests, None) is not None:
            self._selector.unregister(worker.requests)
        ended = worker.kill()
        reason = reason or ended
        if not worker.is_ready:
            message = f"a worker {reason} before it was ready to grade"
            self._start_failed(worker.start_error or WorkersError(message))
            return
        self.num_restarts += 1
        rest = worker.in_flight
        if blame and rest:
            self._retry(rest.popleft(), f"its worker {reason}")
        self._queue.requeue(rest)

    def _retry(self, work: Work, reason: str) -> None:
        work.failures += 1
        if work.failures >= self.limits.attempts:
            work.finish(Failed(reason=reason))
        elif work.outcome is None:
            self.num_retries += 1
            self._queue.pause(work)

    def _pause(self) -> float | None:
        """Seconds until the next deadline or retry; None if there is none."""
        now = time.monotonic()
        due = [] if (paused := self._queue.due()) is None else [paused]
        if len(self._workers) < self.limits.num_workers:
            due.append(self._next_start_time)
        for worker in self._workers:
            if worker.in_flight or not worker.is_ready:
                limit = self.limits.answer_seconds if worker.is_ready else START_SECONDS
                due += [worker.head_started + limit, now + LOOK_EVERY_SECONDS]
        return max(0.0, min(due) - now) if due else None


def reported_error(kind: str, message: str) -> VerifierError:
    """The error that a worker reported instead of becoming ready.

    Only names of classes of `errors` are resolved; others become WorkersError.
    """
    error_class = vars(errors).get(kind)
    if isinstance(error_class, type) and issubclass(error_class, VerifierError):
        return error_class(message)
    return WorkersError(message)
