"""What a push changes in the weights of the last one: bf16 rounds most updates of a step away.

Changes save bytes, and cost more time than writing to memory does: they are for folders elsewhere. A server reads the
whole tensors and all changes since, so it needs nothing of an earlier push.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

LARGEST_SHARE = 0.05
"""Of the entries of all tensors that may change in a push; above it all are written."""
PLACES, VALUES = "places:", "values:"
"""Before the name of a tensor in a file of changes. A place is an index of the flat tensor, in 4 bytes."""
_OF_ITEMSIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_Tensors = Iterable[tuple[str, Tensor]]


class WrittenWeights:
    """The weights of the last push, read back from its files: whole tensors, and changes in the order of the pushes."""

    def __init__(self, folder: Path) -> None:
        """`folder`: with whole tensors only. It may be renamed later."""
        paths = sorted(folder.glob("*.safetensors"))
        self._file_of = {name: file for file in map(_opened, paths) for name in file.keys()}  # noqa: SIM118  (not a mapping)
        self._changes: list[safe_open] = []
        self._num_entries = sum(file.get_tensor(name).numel() for name, file in self._file_of.items())
        self._num_bytes = sum(path.stat().st_size for path in paths)
        self._num_bytes_changed = 0
        self.digests: list[str] = []
        """SHA-256 of each file of changes."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors as a server has them. They are read from the files when they are used."""
        return ((name, self._tensor(name)) for name in self._file_of)

    def changes(self, tensors: _Tensors) -> tuple[dict[str, Tensor] | None, _Tensors]:
        """Places and values of the entries that differ; None where the tensors are to be written whole, with these.

        `tensors`: on the host. Each is asked for once.
        """
        if self._num_bytes_changed > self._num_bytes / 2:  # a server reads all changes again with each push
            return None, tensors
        found: dict[str, Tensor] = {}
        names, rest, num_changed = list[str](), iter(tensors), 0
        # What was compared is known: the tensor of before, with its changes.
        compared = ((name, _patched(self._tensor(name), name, found.__getitem__)) for name in names)
        for name, tensor in rest:
            old = self._tensor(name) if name in self._file_of else None
            if old is None or (old.dtype, old.shape) != (tensor.dtype, tensor.shape):
                return None, chain(compared, [(name, tensor)], rest)
            bits, flat = _OF_ITEMSIZE[old.itemsize], tensor.reshape(-1)
            places = (flat.view(bits) != old.reshape(-1).view(bits)).nonzero()[:, 0]
            num_changed += len(places)
            if num_changed > LARGEST_SHARE * self._num_entries:
                return None, chain(compared, [(name, tensor)], rest)
            names.append(name)
            place = torch.int32 if tensor.numel() < 2**31 else torch.int64
            found |= {PLACES + name: places.to(place), VALUES + name: flat[places]}
        return (found, ()) if len(names) == len(self._file_of) else (None, compared)

    def add(self, changes: dict[str, Tensor], folder: Path) -> None:
        """Write changes into the folder."""
        data = save(changes)
        path = folder / f"changes-{len(self._changes):05}.safetensors"
        path.write_bytes(data)
        self._changes.append(_opened(path))
        self._num_bytes_changed += len(data)
        self.digests.append(hashlib.sha256(data).hexdigest())

    def _tensor(self, name: str) -> Tensor:
        tensor = self._file_of[name].get_tensor(name)
        for file in self._changes:
            tensor = _patched(tensor, name, file.get_tensor)
        return tensor


def _opened(path: Path) -> safe_open:
    return safe_open(path, "pt")


def _patched(tensor: Tensor, name: str, entries: Callable[[str], Tensor]) -> Tensor:
    """A copy of the tensor with the changes that `entries` gives."""
    copy = tensor.clone()
    copy.view(-1)[entries(PLACES + name).long()] = entries(VALUES + name)
    return copy
