"""Signals to ranks above 0, which ignore them because rank 0 ends the run. If rank 0 does not, they print that."""

import os
import signal
import socket
from collections.abc import Callable, Sequence
from types import FrameType

from proximo.distributed.processes import say

PATIENCE_BEATS = 3
"""Heartbeats after which it is known whether rank 0 got the signal too. A scheduler signals all ranks."""


class IgnoredSignals:
    """Receives the signals of this process in its main thread. The heartbeat thread calls `look`.

    Python runs handlers only in the main thread, which may wait in a collective. A byte in a socket arrives anyway.
    """

    def __init__(self, rank: int, numbers: Sequence[signal.Signals]) -> None:
        self._rank = rank
        self._received, self._sent = socket.socketpair()
        self._process = os.getpid()
        self._came: dict[int, int] = {}
        """Signal -> beats since it came."""
        for end in (self._received, self._sent):
            end.setblocking(False)
        signal.set_wakeup_fd(self._sent.fileno(), warn_on_full_buffer=False)
        for number in numbers:
            signal.signal(number, self._on_signal)
            signal.siginterrupt(number, False)  # system calls of libraries continue

    def look(self, name_of: Callable[[int], str], first_heeds: Callable[[], bool]) -> None:
        """At each heartbeat: print the signals that came a while ago, unless rank 0 is about to end the run.

        `name_of`: gives the name of a rank. `first_heeds`: whether rank 0 ends the run.
        """
        self._came = {number: beats + 1 for number, beats in self._came.items()}
        try:
            for number in self._received.recv(64):
                self._came.setdefault(number, 0)
        except BlockingIOError:
            pass
        due = [number for number, beats in self._came.items() if beats >= PATIENCE_BEATS]
        for number in due:
            del self._came[number]
            if not first_heeds():
                say(
                    f"{name_of(self._rank)} got {signal.Signals(number).name} and ignores it: to end the run, send it "
                    f"to {name_of(0)} or to the process that started the ranks"
                )

    def close(self) -> None:
        """Ignore further signals silently. Call it in the main thread."""
        signal.set_wakeup_fd(-1)
        self._received.close()
        self._sent.close()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked child, which must end as usual
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
