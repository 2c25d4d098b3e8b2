"""Runs the source of a program as `__main__` in the confined child, and ends the process.

Event loops of asyncio wake themselves over a socket pair, which the filter forbids. Here they use a pipe instead.
"""

import atexit
import builtins
import gc
import importlib.machinery
import io
import os
import site
import sys
import types
from collections.abc import Collection, Sequence
from types import ModuleType
from typing import Any, NoReturn

OUT_OF_MEMORY_STATUS = 102
"""Exit status after an uncaught MemoryError. A program may choose it as well, but gains nothing by it."""
PROGRAM_NAME = "program.py"
MODULE = "asyncio.selector_events"


def run_as_main(source: str, folder: str) -> NoReturn:
    """Runs the source as `python program.py` in `folder` would, then finishes the interpreter and exits."""
    main = types.ModuleType("__main__")
    vars(main).update(__builtins__=builtins, __file__=f"{folder}/{PROGRAM_NAME}")
    sys.modules["__main__"] = main
    _allow_frames_above()
    status = _status_of(lambda: _execute(source, f"{folder}/{PROGRAM_NAME}", vars(main)))
    status = _status_of(lambda: _finish(main)) or status
    os._exit(status & 0xFF)


def hide_harness(preloaded: Collection[str]) -> None:
    """Makes the interpreter look as if it had just started, except for the preloaded modules of this package.

    Runs once in the fork server, since each program would have to copy the pages that this touches.
    """
    for name in [name for name in sys.modules if name.partition(".")[0] == "proximo_verifiers"]:
        if name not in preloaded:
            del sys.modules[name]
    sys.argv, sys.orig_argv = [PROGRAM_NAME], [sys.executable, PROGRAM_NAME]
    sys.meta_path.insert(0, EventLoopFinder)
    site.setquit()
    _make_streams()


def set_home(folder: str) -> None:
    """Makes `folder` the home, the temporary folder and the first import path of programs."""
    os.environ.update(HOME=folder, TMPDIR=folder)
    sys.path.insert(0, folder)


def _execute(source: str, path: str, names: dict[str, object]) -> None:
    exec(compile(source, path, "exec", dont_inherit=True), names)  # noqa: S102  (this process is confined)


def _make_streams() -> None:
    """Makes the standard streams for descriptors 0, 1 and 2 of programs: a file and two pipes.

    Python checks once whether a descriptor is seekable, so descriptors of the same kinds are put there meanwhile.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    reader, writer = os.pipe()
    errors = os.dup(2)
    for descriptor, like in ((0, nothing), (1, writer), (2, writer)):
        os.dup2(like, descriptor)
    sys.stdin = sys.__stdin__ = _standard(0, "r")
    sys.stdout = sys.__stdout__ = _standard(1, "w")
    sys.stderr = sys.__stderr__ = _standard(2, "w")
    for descriptor, like in ((1, nothing), (2, errors)):
        os.dup2(like, descriptor)
    for descriptor in (nothing, reader, writer, errors):
        os.close(descriptor)


def _allow_frames_above() -> None:
    """Raises the recursion limit by the number of frames above the program."""
    depth = 0
    frame = sys._getframe(1)
    while frame is not None:
        frame, depth = frame.f_back, depth + 1
    sys.setrecursionlimit(sys.getrecursionlimit() + depth + 1)


def _standard(descriptor: int, mode: str) -> io.TextIOWrapper:
    binary = open(descriptor, f"{mode}b", closefd=False)  # noqa: SIM115  (it stays open to the end)
    is_errors = descriptor == 2
    handling = "backslashreplace" if is_errors else "surrogateescape"
    return io.TextIOWrapper(binary, encoding="utf-8", errors=handling, line_buffering=is_errors)


def _status_of(action: types.FunctionType) -> int:
    """Calls the action. Returns the exit status that Python gives for its exception."""
    try:
        action()
    except SystemExit as leaving:
        return _status_of_exit(leaving.code)
    except MemoryError as error:
        _report(error)
        return OUT_OF_MEMORY_STATUS
    except BaseException as error:
        _report(error)
        return 1
    return 0


def _status_of_exit(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    print(code, file=sys.stderr)
    return 1


def _report(error: BaseException) -> None:
    """Reports an exception by sys.excepthook, which a program may replace, without the frames of this file."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def _finish(main: types.ModuleType) -> None:
    """Does what the interpreter does at its end: joins threads, runs exit functions, clears `__main__`, flushes."""
    if "threading" in sys.modules:
        vars(sys.modules["threading"])["_shutdown"]()
    atexit._run_exitfuncs()
    _flush()
    for name in list(vars(main)):
        if name != "__builtins__":
            vars(main)[name] = None
    gc.collect()
    _flush()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()


class PipeEnd:
    """An end of a pipe with the methods that a loop uses of its socket."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor

    def fileno(self) -> int:
        """The descriptor, or -1 if it is closed."""
        return self._descriptor

    def send(self, data: bytes) -> int:
        """Writes to the pipe. Raises OSError if it is closed or full."""
        return os.write(self._descriptor, data)

    def recv(self, size: int) -> bytes:
        """Reads from the pipe. Raises BlockingIOError if it is empty."""
        return os.read(self._descriptor, size)

    def close(self) -> None:
        """Closes the descriptor; later calls do nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


class EventLoopFinder:
    """A finder for `sys.meta_path` that patches the event loop module when it is imported."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of the event loop module; None for other modules."""
        if name != MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_change(module: ModuleType) -> None:
                load(module)
                vars(module)["BaseSelectorEventLoop"]._make_self_pipe = _make_self_pipe

            vars(spec.loader)["exec_module"] = load_and_change
        return spec


def _make_self_pipe(loop: Any) -> None:
    """Wakes the loop through a pipe, in place of asyncio's pair of sockets, which the sandbox refuses."""
    loop._ssock, loop._csock = map(PipeEnd, os.pipe())
    loop._internal_fds += 1
    loop._add_reader(loop._ssock.fileno(), loop._read_from_self)
