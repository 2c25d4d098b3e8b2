"""Heartbeats of the ranks: they find and name the rank that failed, disappeared or hangs.

A thread of each rank writes every second that the rank lives, and in which wait its main thread is. The thread has its
own connection to the store, since a wait of the main thread blocks a shared one.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from proximo.distributed.failure import (
    FAILURE,
    PRINTED,
    Failure,
    first_line,
    is_alive,
    keep_traceback,
    process_table,
    say,
    status_of,
)
from proximo.distributed.world import in_background
from proximo.errors import RankError

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 5.0
"""After a wait has failed, a rank without a heartbeat for so many seconds is missing. Silence alone is not a failure:
a C extension may keep the interpreter busy."""
SEARCH_SECONDS = 8.0
"""Seconds for which the cause of a failed wait is searched."""
GRACE_SECONDS = 3.0
"""Seconds in which the main thread must notice that another rank ended the run. Rank 0 writes files and has longer."""
GRACE_OF_FIRST_SECONDS = 10.0


class DeadlineStore:
    """The calls of a store with a deadline: those of torch wait for ever for a stopped process.

    After one call without an answer, no later call waits. A call raises RuntimeError if no answer comes within
    `seconds`, else the error of the store.
    """

    def __init__(self, store: dist.Store, *, seconds: float) -> None:
        self._store = store
        self._seconds = seconds
        self._is_silent = False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """A method of the store: `check`, `get`, `multi_get`, `set`, `compare_set`."""
        call = getattr(self._store, name)
        return lambda *given: self._answer(lambda: call(*given))

    def _answer(self, call: Callable[[], Any]) -> Any:
        if not self._is_silent:
            answer = in_background(call, name="a call of the store")
            if wait([answer], self._seconds).done:
                return answer.result()
        self._is_silent = True
        raise RuntimeError(f"no answer within {self._seconds:g} s")


@dataclass(frozen=True, slots=True)
class Position:
    """The progress of a rank's main thread."""

    number: int
    """Number of waits that it has entered."""
    waits_for: str
    """The last of these waits."""
    waits: bool
    """Whether it is still in that wait."""

    def __str__(self) -> str:
        return f"{'in' if self.waits else 'after'} {self.waits_for}"


class Watch:
    """Sends the heartbeats of one rank and reads those of the others. `stop` it before the store ends."""

    def __init__(
        self,
        store: dist.Store | DeadlineStore,
        *,
        rank: int,
        size: int,
        timeout_seconds: float,
        store_of: str,
        served: dist.Store | None = None,
        ends_are_reported: bool = False,
    ) -> None:
        """`store`: a connection that nothing else uses. `store_of`: the name of the store's server (`rank 0`).

        `ends_are_reported`: whether the launcher already reports dead processes, so that nobody has to look for them.
        `served`: the store itself, which is kept alive if this process serves it.
        """
        self.rank, self.size = rank, size
        self.failure: Failure | None = None
        """Why the run ends; None as long as it is not known."""
        self.if_stuck: Callable[[str], None] | None = None
        """Called with the reason before the process is ended because its main thread hangs."""
        self._store = store
        self._timeout_seconds = timeout_seconds
        self.position = Position(0, "the start", waits=False)
        """The progress of the main thread. `ProcessGroupWorld` writes it."""
        self._store_of = store_of
        self._served = served
        self._told_of_ends = ends_are_reported
        self._num_beats = 0
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._names: dict[int, tuple[str, int, str]] = {}
        self._leaving = False
        self._stopped = threading.Event()
        self._main_knows = threading.Event()
        self._lock = threading.RLock()
        self._thread = threading.Thread(target=self._run, name="watch of the ranks", daemon=True)

    def start(self) -> None:
        """Write the name of this process to the store, and start the thread."""
        mine = self._names[self.rank] = (process_table(), os.getpid(), socket.gethostname())
        self._store.set(f"name/{self.rank}", json.dumps(mine))
        self._beat()
        self._thread.start()

    def wait_for_all(self, seconds: float) -> None:
        """Wait until every rank has started its watch. Raises RankError that names those that do not come."""
        end = time.monotonic() + seconds
        missing = list(range(self.size))
        while missing and self.failure is None and time.monotonic() < end:
            with self._lock:
                missing = [rank for rank in missing if not self._store.check([f"name/{rank}"])]
            time.sleep(0.02)
        if self.failure is not None:
            raise self.cause("all ranks to start")
        if missing:
            names = ", ".join(map(str, missing[:8])) + (" and more" if len(missing) > 8 else "")
            message = f"{len(missing)} of {self.size} ranks did not start within {seconds:g} s: {names}"
            self.publish(Failure(rank=missing[0], message=message, is_alive=True))
            raise self.cause("all ranks to start")

    def leave(self) -> None:
        """From now on, the end of another rank is not a failure."""
        self._leaving = True

    def linger(self, seconds: float) -> None:
        """Serve the store until all other ranks have noticed that the run ends, so that they can read why."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                if self._store.check([f"ends/{rank}" for rank in range(self.size) if rank != self.rank]):
                    return
            except (dist.DistError, RuntimeError):
                return
            time.sleep(0.05)

    def stop(self) -> None:
        """End the thread that watches the other ranks."""
        if self.failure is not None:
            with suppress(dist.DistError, RuntimeError), self._lock:
                self._store.set(f"ends/{self.rank}", "")
        self._stopped.set()
        self._thread.join(timeout=2 * BEAT_SECONDS)

    def name_of(self, rank: int) -> str:
        """The name of a rank in messages, as `rank 2 (process 4711 on host7)`."""
        return f"rank {rank} ({self.process_of(rank) or 'which never joined'})"

    def process_of(self, rank: int) -> str | None:
        """The process of a rank, as `process 4711 on host7`; None if it never joined."""
        if rank not in self._names and self._store.check([f"name/{rank}"]):
            machine, process, host = json.loads(self._store.get(f"name/{rank}"))
            self._names[rank] = (machine, process, host)
        if rank not in self._names:
            return None
        _, process, host = self._names[rank]
        return f"process {process} on {host}"

    def publish(self, failure: Failure) -> Failure:
        """Record a failure for all ranks, unless one is recorded. Returns the recorded one."""
        with self._lock:
            if self.failure is None:
                try:
                    self.failure = Failure.decode(self._store.compare_set(FAILURE, "", failure.encode()))
                except (dist.DistError, RuntimeError):  # the store has ended: each rank is by itself
                    self.failure = failure
            return self.failure

    def publish_error(self, error: BaseException, traces: Path | None) -> None:
        """Record the error of this rank for all ranks. Its traceback goes to a new file below `traces`."""
        self._main_knows.set()
        if self.rank == 0:
            self.claims_message()  # rank 0 prints it, whatever the type
        if self.failure is not None:
            return
        message = f"{self.name_of(self.rank)} failed: {type(error).__name__}: {error}"
        if self.rank > 0 and not isinstance(error, RankError):
            message += keep_traceback(error, None if traces is None else traces / f"rank-{self.rank}.log")
        self.publish(Failure(rank=self.rank, message=message, status=status_of(error), is_alive=True))

    def claims_message(self) -> bool:
        """Whether this rank prints how the run ends. True for the first rank that asks."""
        try:
            return self._store.compare_set(PRINTED, "", str(self.rank)) == str(self.rank).encode()
        except (dist.DistError, RuntimeError):
            return self.rank == (1 if self._store_of == "rank 0" else 0)

    def lost_first(self) -> str | None:
        """The process of rank 0 if it has disappeared, and this rank is the first to report it."""
        failure = self.failure
        is_gone = failure is not None and failure.rank == 0 and not failure.is_alive
        if self.rank == 0 or not is_gone or not self.claims_message():
            return None
        with suppress(dist.DistError, RuntimeError):
            return self.process_of(0) or "rank 0"
        return "rank 0"

    def cause(self, what: str, error: Exception | None = None) -> RankError:
        """The error for a failed wait `what` of the main thread. It names the rank at fault. Takes a few seconds."""
        end = time.monotonic() + SEARCH_SECONDS
        while self.failure is None:
            try:
                with self._lock:
                    found = self._missing(SILENCE_SECONDS)
            except (dist.DistError, RuntimeError) as lost:
                found = self._without_store(lost)
            if found is None and self.failure is None and time.monotonic() > end:
                found = self._late(error)
            if found is not None:
                self.publish(found)
                break
            time.sleep(0.05)
        failure = self.failure
        assert failure is not None
        self._main_knows.set()
        waits = "" if failure.rank == self.rank else f"; rank {self.rank} waited for it in: {what}"
        return RankError(f"{failure.message}{waits}", exit_status=failure.status)

    def _run(self) -> None:
        while not self._stopped.wait(BEAT_SECONDS):
            try:
                with self._lock:
                    self._beat()
                    self._look()
            except (dist.DistError, RuntimeError) as error:
                if self._leaving or self._stopped.is_set():
                    return
                self.failure = self.failure or self._without_store(error)
            if self.failure is not None and not self._leaving:
                self._end()
                return

    def _beat(self) -> None:
        self._num_beats += 1
        now = self.position
        beat = [self._num_beats, now.number, now.waits_for, now.waits]
        self._store.set(f"beat/{self.rank}", json.dumps(beat))

    def _look(self) -> None:
        """Look for a failure. All ranks are read one after the other, the more rarely the more there are."""
        if self._leaving:
            return
        if self._num_beats % max(1, self.size // 64) == 0:
            found = self._missing(self._timeout_seconds)
            if found is not None:
                self.publish(found)
        elif self._store.check([FAILURE]):
            self.failure = Failure.decode(self._store.get(FAILURE))

    def _missing(self, seconds: float) -> Failure | None:
        """The failure in the store; else that of a rank that ended or sent no heartbeat for so long."""
        if self._store.check([FAILURE]):
            self.failure = Failure.decode(self._store.get(FAILURE))
            return None
        now, others = time.monotonic(), [rank for rank in range(self.size) if rank != self.rank]
        for rank, beat in zip(others, self._beats(others), strict=True):
            if self._has_ended(rank):
                return Failure(rank=rank, message=f"{self.name_of(rank)} is gone")
            if not beat or rank not in self._seen or self._seen[rank][0] != beat:  # no heartbeat: it has not joined yet
                self._seen[rank] = (beat, now)
            silence = now - self._seen[rank][1]
            if silence >= seconds:
                name = self.name_of(rank)
                return Failure(rank=rank, message=f"{name} is stopped or gone: no sign of life for {silence:.0f} s")
        return None

    def _beats(self, ranks: Sequence[int]) -> list[bytes]:
        """The last heartbeat of each rank; empty if it has not joined yet."""
        keys = [f"beat/{rank}" for rank in ranks]
        if self._store.check(keys):
            return self._store.multi_get(keys)
        return [self._store.get(key) if self._store.check([key]) else b"" for key in keys]

    def _has_ended(self, rank: int) -> bool:
        """Whether the process of a rank on this machine has ended."""
        self.name_of(rank)
        if self._told_of_ends or rank not in self._names:
            return False
        machine, process, _ = self._names[rank]
        return machine == process_table() and not is_alive(process)

    def _without_store(self, error: Exception) -> Failure:
        message = f"{self._store_of} is gone: its store does not answer ({first_line(error)})"
        return Failure(rank=0 if self._store_of == "rank 0" else None, message=message)

    def _late(self, error: Exception | None) -> Failure:
        """Used when all ranks live and none has failed: the others wait for the rank with the least progress."""
        positions = {self.rank: self.position}
        for rank, (beat, _) in self._seen.items():
            if beat:
                positions[rank] = Position(*json.loads(beat)[1:])
        furthest = max(position.number for position in positions.values())
        last = min(positions, key=lambda rank: positions[rank].number)
        if positions[last].number < furthest:
            message = f"{self.name_of(last)} lives but did not arrive: it is {positions[last]}"
            return Failure(rank=last, message=message, is_alive=True)
        reason = "" if error is None else f" ({first_line(error)})"
        where = "; ".join(f"rank {rank} is {position}" for rank, position in sorted(positions.items())[:4])
        return Failure(rank=None, message=f"the ranks lost each other, though all live{reason}: {where}")

    def _end(self) -> None:
        """End the process if its main thread hangs."""
        failure = self.failure
        assert failure is not None
        if self._main_knows.wait(GRACE_SECONDS if self.rank else GRACE_OF_FIRST_SECONDS):
            return
        if self.lost_first() or (self.rank == 0 and self.claims_message()):
            say(f"error: {failure.message}")
        if self.if_stuck is not None:
            self.if_stuck(failure.message)
        with suppress(dist.DistError, RuntimeError):
            self._store.set(f"ends/{self.rank}", "")
        os._exit(failure.status)
