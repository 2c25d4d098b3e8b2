"""Event loops of asyncio in the sandbox. A loop wakes itself over a pair of sockets, which nobody can make there: here
it does over a pipe. Not what it may wait for: that is the filter's matter.
"""

import importlib.machinery
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any

MODULE = "asyncio.selector_events"


class PipeEnd:
    """What a loop asks of its socket."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor

    def fileno(self) -> int:
        """The descriptor, or -1 when it is closed."""
        return self._descriptor

    def send(self, data: bytes) -> int:
        """Raises OSError where it is closed, or full."""
        return os.write(self._descriptor, data)

    def recv(self, size: int) -> bytes:
        """Raises BlockingIOError where nothing has come."""
        return os.read(self._descriptor, size)

    def close(self) -> None:
        """Once or more often."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


class EventLoopFinder:
    """For `sys.meta_path`: the module of the loops as the library has it, but for how they wake themselves."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """None for every module but one."""
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
    """As `BaseSelectorEventLoop._make_self_pipe`."""
    loop._ssock, loop._csock = map(PipeEnd, os.pipe())
    loop._internal_fds += 1
    loop._add_reader(loop._ssock.fileno(), loop._read_from_self)
