"""The memory calls of the CUDA driver, with shared memory of the host in place of a device's. It needs no Proximo.

Two processes with one folder see the same memory, each at an address of its own.
"""

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NOT_FOUND, NO_ROOM, INVALID = 100, 2, 400


class FakeDriver:
    """Stands in for the library. Every call returns a status, 0 for success."""

    def __init__(self, folder: Path, *, room: int = 2**40) -> None:
        self.folder, self.room = folder, room
        self.events: list[str] = []
        """What happened to memory, in order."""
        self._mapped: dict[int, tuple[Tensor, Path]] = {}

    @property
    def num_mapped(self) -> int:
        """Pieces of memory that are allocated or open here."""
        return len(self._mapped)

    def cuMemAlloc_v2(self, address: Any, size: Any) -> int:
        self.events.append("allocate")
        if size.value > self.room:
            return NO_ROOM
        path = self.folder / f"memory-{len(self.events)}"
        path.write_bytes(bytes(size.value))
        address._obj.value = self._map(path)
        return 0

    def cuMemFree_v2(self, address: Any) -> int:
        self.events.append("free")
        _, path = self._mapped.pop(address.value)
        path.unlink()
        return 0

    def cuIpcGetMemHandle(self, handle: Any, address: Any) -> int:
        _, path = self._mapped[address.value]
        name = path.name.encode()
        ctypes.memmove(handle._obj, b"\0\xff" + name + bytes(62 - len(name)), 64)
        return 0

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: Any) -> int:
        assert flags.value == 1
        self.events.append("open")
        content = bytes(handle)
        path = self.folder / content[2:].rstrip(b"\0").decode()
        if content[:2] != b"\0\xff" or not path.is_file():
            return INVALID
        address._obj.value = self._map(path)
        return 0

    def cuIpcCloseMemHandle(self, address: Any) -> int:
        self.events.append("close")
        return 0 if self._mapped.pop(address.value, None) else INVALID

    def _map(self, path: Path) -> int:
        memory = torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)
        self._mapped[memory.data_ptr()] = memory, path
        return memory.data_ptr()


def tensor_at(address: int, size: int, device: torch.device) -> Tensor:
    """The bytes at an address of this process."""
    assert device.type == "cpu"
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
