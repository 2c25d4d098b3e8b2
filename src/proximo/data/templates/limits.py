"""Limits for chat templates, which come with a model's folder and are untrusted code: they may loop or fill the memory.

A template is first tried in a child process, whose time and memory the kernel limits (`try_template`). Renderings in
this process then have a limit of time (`limited`). Jinja's sandbox keeps templates from the interpreter in both.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from proximo.errors import DataError, ModelError

CPU_SECONDS = 10
"""Processor time of one rendering; a normal template takes about a millisecond."""
MEMORY_BYTES = 2**30
"""Memory of a trial."""
WALL_SECONDS = 300.0
"""Limit for a trial that neither computes nor ends."""
WATCH_SECONDS = 0.5
"""How often the watchdog looks at the renderings."""


class RenderingError(DataError):
    """A template refused a conversation; the message is the template's."""


class TemplateLimitError(ModelError):
    """A template used more time or memory than any rendering needs."""


class _OverdueError(BaseException):
    """Raised inside a rendering that is beyond its time. Jinja handles every `Exception` itself."""


@lru_cache(maxsize=64)
def try_template(template: str, tokens: str) -> None:
    """Renders a question in a child process. `tokens`: the special tokens, as JSON.

    Raises TemplateLimitError for a template beyond the limits. What it writes or refuses does not matter here.
    """
    program = str(Path(__file__).with_name("trial_child.py"))
    try:
        ended = subprocess.run(
            [sys.executable, "-P", program, str(CPU_SECONDS), str(MEMORY_BYTES)],
            input=json.dumps([template, json.loads(tokens)]).encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that only the trainer gets an interrupt at the terminal
            env=os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
            timeout=WALL_SECONDS,
            check=False,
        ).returncode
    except subprocess.TimeoutExpired as error:
        raise limit_error(f"{WALL_SECONDS:.0f} s") from error
    except OSError as error:
        raise ModelError(f"no process could be started to try chat templates in: {error}") from error
    if ended == -signal.SIGXCPU:
        raise limit_error(f"{CPU_SECONDS:g} s of computing")
    if ended:
        raise limit_error(f"{MEMORY_BYTES >> 20} MiB of memory")


@contextmanager
def limited() -> Generator[None]:
    """Ends a rendering in this thread that computes for too long. Raises TemplateLimitError.

    A single operation of the interpreter, for example a power of large numbers, is not interrupted.
    """
    try:
        with _WATCHDOG.watching():
            yield
    except _OverdueError as error:
        raise limit_error(f"{CPU_SECONDS:g} s of computing") from error
    except MemoryError as error:
        raise limit_error("the system's free memory") from error


def limit_error(limit: str) -> TemplateLimitError:
    """The error for a rendering beyond a limit such as "10 s of computing"."""
    return TemplateLimitError(f"it took more than {limit}, so it is broken or malicious")


class _Watchdog:
    """A thread that looks at the renderings of all threads, and raises `_OverdueError` in one that is beyond its time.

    It compares the processor time of each thread, so the load of the machine ends no rendering.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: dict[int, float] = {}
        """Thread -> its processor time at which its rendering must have ended."""
        self._thread: threading.Thread | None = None

    @contextmanager
    def watching(self) -> Generator[None]:
        """Watches this thread while the block runs."""
        me = threading.get_ident()
        with self._lock:
            self._ends[me] = _seconds_of(me) + CPU_SECONDS
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="chat template watchdog", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            # An error that was raised just now arrives here, before the next instruction.
            with self._lock:
                self._ends.pop(me, None)

    def _watch(self) -> None:
        pause = threading.Event()
        while True:
            pause.wait(WATCH_SECONDS)
            with self._lock:
                for thread in [each for each, end in self._ends.items() if _seconds_of(each) > end]:
                    del self._ends[thread]
                    _raise_overdue_in(thread)


def _seconds_of(thread: int) -> float:
    """The processor time of a thread; where the system has none for other threads, the time of day."""
    if hasattr(time, "pthread_getcpuclockid"):
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    return time.monotonic()


def _raise_overdue_in(thread: int) -> None:
    """Raises `_OverdueError` in another thread, before its next instruction.

    It is never taken back: CPython 3.11 would look for it before every instruction from then on, and a profiler would
    stop the thread.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_OverdueError))


_WATCHDOG = _Watchdog()
os.register_at_fork(after_in_child=_WATCHDOG.__init__)  # the thread, and perhaps the holder of the lock, are gone there
