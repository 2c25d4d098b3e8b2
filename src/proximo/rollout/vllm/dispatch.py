"""Asks several servers for responses: balanced, with bounded retries. Each result is passed on when it arrives."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from proximo.errors import TrainingError
from proximo.http_client import RequestRefusedError, UnansweredError
from proximo.rollout.vllm.server import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, VLLMServer

ATTEMPTS = 5
"""Times that a response is asked for before the run stops."""
FAILURES_IN_A_ROW = 3
"""A server gets no more work of a call after this many failures in a row, while another one has fewer."""
Result = TypeVar("Result")


@dataclass(kw_only=True, eq=False, slots=True)
class Job(Generic[Result]):
    """One response to ask for."""

    home: int
    """Index of the preferred server, which has the prompt in its prefix cache. Any other may answer."""
    ask: Callable[[VLLMServer], Result]
    """Raises UnansweredError where another attempt may succeed. Any other exception ends the call."""
    num_failures: int = 0
    """Attempts that reached a server. Attempts during a restart, which reach none, do not count."""
    failed_at: set[int] = field(default_factory=set)
    """Indices of servers at which it failed. Emptied once it has failed at every working server."""


class Dispatch(Generic[Result]):
    """Some jobs, their threads, and their results. Jobs may be added while others are under way.

    Every job ends: requests have deadlines, jobs a number of attempts, and waits for unreachable servers a limit.
    """

    def __init__(self, servers: Sequence[VLLMServer], jobs: Sequence[Job[Result]], *, attempts: int) -> None:
        self._servers = servers
        self._attempts = attempts
        self._num_open = len(jobs)
        """Jobs whose results were not taken yet."""
        self._waiting = [deque(job for job in jobs if job.home == index) for index in range(len(servers))]
        self._num_threads = [0] * len(servers)
        self._failures_in_a_row = [0] * len(servers)
        self._is_over = False
        self._changed = threading.Condition()
        self._results: queue.SimpleQueue[Result | BaseException] = queue.SimpleQueue()
        self.num_retries = 0

    def run(self) -> Iterator[Result]:
        """Yields each result when it arrives. Raises errors of jobs, and TrainingError when attempts are used up."""
        try:
            self._start_threads()
            while self._num_open:
                yield self._taken(self._results.get())
        finally:
            self.close()

    def add(self, jobs: Sequence[Job[Result]]) -> None:
        """Begin more jobs. May be called from any thread."""
        with self._changed:
            self._num_open += len(jobs)
            for job in jobs:
                self._waiting[job.home].append(job)
            self._changed.notify_all()
            self._start_threads()

    def results(self, wait_seconds: float) -> list[Result]:
        """The results that have come. Waits at most this long for the first. Raises as `run`."""
        found: list[Result] = []
        with suppress(queue.Empty):
            found.append(self._taken(self._results.get(timeout=wait_seconds)))
            while True:
                found.append(self._taken(self._results.get_nowait()))
        return found

    def close(self) -> None:
        """Begin no more jobs. Threads end after their requests."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _taken(self, result: Result | BaseException) -> Result:
        if isinstance(result, BaseException):
            raise result
        with self._changed:
            self._num_open -= 1
        return result

    def _start_threads(self) -> None:
        """As many for each server as it takes requests at a time, and not more than its share of the open jobs."""
        share = -(-self._num_open // len(self._servers))
        for index, server in enumerate(self._servers):
            while self._num_threads[index] < min(server.limits.max_concurrent_requests, share):
                self._num_threads[index] += 1
                threading.Thread(target=self._work, args=(index,), daemon=True, name="vllm-requests").start()

    def stop(self) -> None:
        """End the call. Its `run` raises TrainingError."""
        self._results.put(TrainingError("the engine was stopped while it sampled"))

    def _work(self, index: int) -> None:
        """The work of one thread, which asks one server."""
        while (job := self._next(index)) is not None:
            try:
                result = job.ask(self._servers[index])
            except UnansweredError as error:
                self._put_back(job, index, error)
            except RequestRefusedError as error:
                self._results.put(TrainingError(f"a vLLM server refused a request: {error}"))
                return
            except BaseException as error:  # raised again in the caller's thread
                self._results.put(error)
                return
            else:
                with self._changed:
                    if self._failures_in_a_row[index]:
                        self._failures_in_a_row[index] = 0
                        self._changed.notify_all()  # its other threads may take work of others again
                self._results.put(result)

    def _next(self, index: int) -> Job[Result] | None:
        """The next job of a server, its own ones first; waits for one. None when the call is over."""
        with self._changed:
            while not self._is_over:
                if (job := self._pick(index)) is not None:
                    return job
                self._changed.wait()
        return None

    def _pick(self, index: int) -> Job[Result] | None:
        """Take a job that waits and that the server may do: one of its own, or of the longest other queue."""
        if self._is_left_out(index):
            return None
        # A failing server takes no jobs of others, except those of a server that gets no work: no other would do them.
        fails = self._failures_in_a_row[index] > 0
        others = [home for home in range(len(self._servers)) if not fails or self._is_left_out(home)]
        for home in (index, *sorted(others, key=lambda home: -len(self._waiting[home]))):
            for job in self._waiting[home]:
                # Not jobs at which it failed, while another server can try them.
                if index not in job.failed_at or not self._working(besides=job.failed_at):
                    self._waiting[home].remove(job)
                    return job
        return None

    def _working(self, *, besides: Collection[int]) -> list[int]:
        """The servers that get work, without some."""
        return [each for each in range(len(self._servers)) if each not in besides and not self._is_left_out(each)]

    def _is_left_out(self, index: int) -> bool:
        others = [count for number, count in enumerate(self._failures_in_a_row) if number != index]
        return self._failures_in_a_row[index] >= FAILURES_IN_A_ROW > min(others, default=FAILURES_IN_A_ROW)

    def _put_back(self, job: Job[Result], index: int, error: UnansweredError) -> None:
        """Count a failure, give the job to another working server, and pause this one for a while."""
        nobody = error.connection == "none"
        job.num_failures += not nobody
        server = self._servers[index]
        for each in self._servers:
            each.restart_if_ended()
        limits, why = server.limits, None
        if all(each.has_ended() for each in self._servers):
            why = f"the vLLM server {server.url} answers no more: {error}"
        elif nobody and all(each.absence.is_too_long for each in self._servers):
            waited = f"{limits.start_seconds:g} s ({limits.section}.start_seconds)"
            why = f"no vLLM server could be reached for {waited}, the last at {server.url}: {error}"
        elif job.num_failures == self._attempts:
            last = f"the last at the vLLM server {server.url}: {error}"
            limit = f"{limits.section}.request_seconds is the limit of each"
            why = f"no usable response after {self._attempts} attempts, {last} ({limit})"
        if why is not None:
            self._results.put(TrainingError(f"{why}; {server.last_words()}"))
            return
        with self._changed:
            self.num_retries += 1
            self._failures_in_a_row[index] += 1
            job.failed_at.add(index)
            if not self._working(besides=job.failed_at):
                job.failed_at = {index}
            able = self._working(besides=job.failed_at) or [index]
            job.home = min(able, key=lambda each: (self._failures_in_a_row[each], (each - index) % len(self._servers)))
            self._waiting[job.home].append(job)
            self._changed.notify_all()
            pause = FIRST_PAUSE_SECONDS * 2 ** min(self._failures_in_a_row[index] - 1, 10)
            pause = min(max(pause, error.not_before_seconds), LONGEST_PAUSE_SECONDS)
            self._changed.wait_for(lambda: self._is_over or (nobody and not server.absence.is_under_way), pause)
