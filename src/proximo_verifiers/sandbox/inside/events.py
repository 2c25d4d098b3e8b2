"""Makes asyncio event loops work in the sandbox.

A loop wakes itself over a socket pair, which the filter forbids. Here it uses a pipe instead.
"""

import importlib.machinery
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any

MODULE = "asyncio.selector_events"


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
