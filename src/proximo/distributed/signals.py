"""The signals that end a run. Rank 0 ends the step, saves and exits (`Interruption`); the other ranks ignore them.

with Interruption() as interruption:
    for step in ...:
        ...
        if interruption.requested:
            interruption.step_ended()
            ...save...
            raise SystemExit(interruption.exit_status)
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from types import FrameType, TracebackType
from typing import Any, Self

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that end a run after its step. SIGHUP comes from a terminal that was closed."""
USER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""Further such signals: job scripts let their scheduler send one before the time limit."""


def heeded_signals() -> list[signal.Signals]:
    """The signals that end a run after its step, without those that this process handles otherwise.

    A parent may have ignored one, as `nohup` does with SIGHUP, and a program may have its own handler for SIGUSR1 or 2.
    """
    stops = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    return stops + [number for number in USER_SIGNALS if signal.getsignal(number) is signal.SIG_DFL]


def ignore_signals() -> None:
    """On a rank above 0: ignore the signals that end a run, since rank 0 ends it. A scheduler sends them to all ranks.

    Forked children do not ignore them.
    """
    process = os.getpid()

    def ignore(number: int, _frame: FrameType | None) -> None:
        if os.getpid() != process:
            _die_of(number)

    for number in heeded_signals():
        signal.signal(number, ignore)
        signal.siginterrupt(number, False)  # system calls of libraries continue


def _die_of(number: int) -> None:
    """End this process by the signal, as without a handler."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


class Interruption:
    """Within its context, the first signal is a request; the step then has `grace_seconds` to end.

    If the step does not end in time, or a second signal comes, the process ends at once with status 128 plus the number
    of the signal. A resumed run repeats the step. Saves are atomic, so nothing can be damaged. With `keeps_process`,
    SIGINT never ends the process: the step may take as long as it needs, and a second SIGINT raises KeyboardInterrupt.
    Signals are left as they are outside the main thread, where Python allows no handlers, and if this process ignores
    them (`heeded_signals`).
    """

    def __init__(
        self,
        *,
        grace_seconds: float = 25.0,
        repeat_seconds: float = 0.0,
        before_leaving: Callable[[int], None] | None = None,
        keeps_process: bool = False,
    ) -> None:
        """`repeat_seconds`: a signal that is repeated within this time counts as the same one from another sender.

        `keeps_process`: SIGINT comes from a person whose program continues afterwards, as in a notebook.

        `before_leaving` is called with the exit status before the process ends at once.
        """
        self._grace_seconds = grace_seconds
        self._repeat_seconds = repeat_seconds
        self._before_leaving = before_leaving
        self._keeps_process = keeps_process
        self._came_at = 0.0
        self._signal: int | None = None
        self._process = os.getpid()
        self._previous: dict[int, Any] = {}
        # A queue, because its `put` may run inside a signal handler that interrupted the queue itself.
        self._signalled: SimpleQueue[bool] = SimpleQueue()

    @property
    def requested(self) -> bool:
        """Whether a signal came: end here."""
        return self._signal is not None

    @property
    def exit_status(self) -> int:
        """The status to leave with: 128 plus the number of the signal. Only once a signal came."""
        if self._signal is None:
            raise RuntimeError("no signal came: there is no exit status of an interruption")
        return 128 + self._signal

    def step_ended(self) -> None:
        """Tell that the step ended in time: the save after it may take as long as it needs."""
        if self.requested:
            self._signalled.put(False)

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        threading.Thread(target=self._watch, name="interruption", daemon=True).start()
        for number in heeded_signals():
            previous = signal.signal(number, self._on_signal)
            self._previous[number] = signal.SIG_DFL if previous is None else previous
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        self._previous.clear()
        self._signalled.put(False)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked child
            _die_of(number)
            return
        if self._signal is not None:
            if time.monotonic() - self._came_at < self._repeat_seconds:
                return
            if self._keeps_process and number == signal.SIGINT:
                raise KeyboardInterrupt("a second interrupt: the step is given up; the last checkpoint is complete")
            self._leave("a second signal: leaving at once; the last checkpoint is complete")
        self._signal = number
        self._came_at = time.monotonic()
        if self._keeps_process and number == signal.SIGINT:
            _say("interrupted: ending this step, then saving. A second interrupt gives the step up")
            return
        self._signalled.put(True)
        _say(
            f"{signal.Signals(number).name}: ending this step (at most {self._grace_seconds:g} s), then saving and "
            "leaving. A second signal leaves at once"
        )

    def _watch(self) -> None:
        if not self._signalled.get():
            return
        try:
            self._signalled.get(timeout=self._grace_seconds)
        except Empty:  # neither the step nor the training ended
            self._leave(f"the step did not end within {self._grace_seconds:g} s: leaving; resuming will redo it")

    def _leave(self, reason: str) -> None:
        _say(reason)
        if self._before_leaving is not None:
            self._before_leaving(self.exit_status)
        os._exit(self.exit_status)


def _say(text: str) -> None:
    """Write to standard error without its lock: the handler may have interrupted code that holds it."""
    with contextlib.suppress(OSError):  # a closed stream must not keep the process from leaving
        os.write(2, f"\n{text}\n".encode())
