"""Signals that come to a rank above 0. Rank 0 ends the run for all: the others go on, and say so where it does not."""

import os
import signal
import socket
from collections.abc import Callable, Sequence
from types import FrameType

from proximo.distributed.processes import say

PATIENCE_BEATS = 3
"""A scheduler signals all ranks: so many signs of life later, it is known whether rank 0 has heeded its own."""


class IgnoredSignals:
    """Takes the signals of this process, in its main thread. `look` is for the thread that watches the ranks.

    Python runs handlers in the main thread alone, which may wait in a collective; a byte in a socket arrives at once.
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
            signal.siginterrupt(number, False)  # system calls of libraries go on

    def look(self, name_of: Callable[[int], str], first_heeds: Callable[[], bool]) -> None:
        """At each beat: say which signals came a while ago, if rank 0 is not about to end the run.

        `name_of`: of a rank. `first_heeds`: whether rank 0 ends the run.
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
                    f"{name_of(self._rank)} got {signal.Signals(number).name} and goes on: to end the run, send it to "
                    f"{name_of(0)} or to the process that started the ranks"
                )

    def close(self) -> None:
        """From here on signals are passed over in silence. Call it in the main thread."""
        signal.set_wakeup_fd(-1)
        self._received.close()
        self._sent.close()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked child, which must die of it as it would without us
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
