"""Memory of a CUDA device that a server on the same machine can open, and the weights of a push packed into it.

The memory comes from the CUDA driver and not from torch, so that its handle says the same to any version of torch:
64 bytes, which travel as text. `inside/proximo_vllm.py` opens it.
"""

import base64
import ctypes
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LOG = logging.getLogger("proximo.rollout")
BOOT = Path("/proc/sys/kernel/random/boot_id")
"""What Linux names this machine until it boots again."""
SHAREABLE = "cuda"
"""Type of the devices whose memory another process can open."""
_HANDLE_BYTES = 64
_PAGE_BYTES = 2 * 2**20
"""The driver may put smaller pieces into one page, and a handle is that of a page."""
_ALIGNMENT = 256


class DeviceMemory:
    """A piece of memory of one device. Its numbers are `bytes`, until `close`."""

    def __init__(self, device: torch.device, size: int) -> None:
        """`size`: in bytes. Raises OSError if there is no driver, no room, or no way to share memory."""
        self.device, self.size = device, size
        self._host = BOOT.read_text(encoding="ascii").strip()
        self._driver = driver()
        self._address = ctypes.c_uint64()
        handle = (ctypes.c_char * _HANDLE_BYTES)()
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # makes the device's context that of this thread
            torch.cuda.empty_cache()  # what torch keeps for later is not free for the driver
            pages = -(-size // _PAGE_BYTES) * _PAGE_BYTES
            self._call("cuMemAlloc_v2", ctypes.byref(self._address), ctypes.c_size_t(pages))
            try:
                self._call("cuIpcGetMemHandle", ctypes.byref(handle), self._address)
            except OSError:
                self.close()
                raise
        self._handle = bytes(handle)
        self.bytes = tensor_at(self._address.value, size, device)

    def as_sent(self) -> dict[str, Any]:
        """What a process on the same machine needs to open it."""
        return {
            "host": self._host,
            "handle": base64.b64encode(self._handle).decode(),
            "size": self.size,
        }

    def close(self) -> None:
        """Free the memory. No other process may have it open."""
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            self._call("cuMemFree_v2", self._address)

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._driver, name)(*arguments):
            raise OSError(f"{name} of the CUDA driver failed with status {status}")


def driver() -> ctypes.CDLL:
    """The CUDA driver. Raises OSError if there is none."""
    return ctypes.CDLL("libcuda.so.1")


class _Array:
    """Memory at an address, as torch reads it without a copy."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 2}


def tensor_at(address: int, size: int, device: torch.device) -> Tensor:
    """The bytes of a device's memory. The tensor does not own them."""
    return torch.as_tensor(_Array(address, size), device=device)


class PackedWeights:
    """The tensors of one push, in the dtype in which they are sent. They stay until the next push fills it anew."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> None:
        """Raises OSError as `DeviceMemory` does."""
        self.shapes, self.dtype, self.device = dict(shapes), dtype, device
        self._offsets: dict[str, int] = {}
        size = 0
        for name, shape in shapes.items():
            self._offsets[name] = size
            size += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self.memory = DeviceMemory(device, size)

    @torch.no_grad()
    def fill(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Write the tensors. Each is read once, and no other copy of it is made."""
        for name, tensor in tensors:
            self._view(name).copy_(tensor)
        torch.cuda.synchronize(self.device)  # the server reads on a stream of its own

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors as they were sent; views of the memory."""
        return ((name, self._view(name)) for name in self.shapes)

    def layout(self) -> list[list[Any]]:
        """Name, type, shape and first byte of each tensor."""
        dtype = str(self.dtype).removeprefix("torch.")
        return [[name, dtype, list(shape), self._offsets[name]] for name, shape in self.shapes.items()]

    def _view(self, name: str) -> Tensor:
        shape, start = self.shapes[name], self._offsets[name]
        return self.memory.bytes[start : start + math.prod(shape) * self.dtype.itemsize].view(self.dtype).view(shape)


def packed_weights(
    earlier: PackedWeights | None, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> PackedWeights | None:
    """Room for a push on this device: that of the earlier one if it fits; None if the device gives none."""
    if earlier is not None:
        if (earlier.shapes, earlier.dtype, earlier.device) == (dict(shapes), dtype, device):
            return earlier
        earlier.memory.close()
    if device.type != SHAREABLE:
        return None
    try:
        return PackedWeights(shapes, dtype, device)
    except OSError as error:
        LOG.warning("weights go to the vLLM servers through files: %s", error)
        return None
