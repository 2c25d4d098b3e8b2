"""Named tensors as one safetensors file per rank and an index: exact bits, no pickle.

The files have the format of torch.distributed.checkpoint's HuggingFaceStorageWriter(save_distributed=True), so its
reader accepts them. The index adds whole shapes, also of tensors that no rank has a part of. Writing needs no
collective, and reading no other rank: any number of ranks, or one process without torch.distributed, reads its parts.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from proximo.distributed.world import current
from proximo.errors import CheckpointError

_OFFSETS = "DCP_SHARDING_INFO"


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalPart:
    """The part of a tensor on this rank."""

    tensor: Tensor
    offsets: tuple[int, ...]
    """Index of its first element in the whole tensor, one number for each dimension."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    is_first_copy: bool
    """Whether no rank before this one has the same part."""


def local_part(tensor: Tensor) -> LocalPart:
    """The part of a tensor on this rank: its shard, which may be empty, or the whole of an unsharded tensor."""
    shape, own = tuple(tensor.shape), tensor.detach()
    if not is_sharded(tensor):
        return LocalPart(tensor=own, offsets=(0,) * len(shape), shape=shape, is_first_copy=current().leads)
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(own, DTensor)
    _, offsets = compute_local_shape_and_global_offset(own.shape, own.device_mesh, own.placements)
    coordinates = own.device_mesh.get_coordinate() or []
    copies = [at for at, placement in zip(coordinates, own.placements, strict=True) if placement.is_replicate()]
    return LocalPart(tensor=own.to_local(), offsets=tuple(offsets), shape=shape, is_first_copy=not any(copies))


def is_sharded(tensor: Tensor) -> bool:
    """Whether each rank has only a part of the tensor: it is a DTensor, whose import takes a second."""
    return hasattr(tensor, "to_local")


def gather_whole(tensors: Mapping[str, Tensor], *, what: str) -> dict[str, Tensor]:
    """Whole copies of small tensors on the CPU of every rank. Every rank has to call it."""
    parts = {name: local_part(tensor) for name, tensor in tensors.items()}
    ours = {name: (part.offsets, part.tensor.cpu()) for name, part in parts.items() if part.is_first_copy}
    result = {name: torch.empty(part.shape, dtype=part.tensor.dtype) for name, part in parts.items()}
    for of_rank in current().gather(ours, what=what):
        for name, (offsets, piece) in of_rank.items():
            place = tuple(slice(o, o + n) for o, n in zip(offsets, piece.shape, strict=True))
            result[name][place] = piece
    return result


class CapturedShards:
    """Copies of this rank's parts of tensors in host memory. A save writes them while training continues."""

    def __init__(self, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, Any] | None = None) -> None:
        """`metadata`: JSON for the index."""
        parts = {name: local_part(tensor) for name, tensor in tensors.items()}
        described = {name: {"dtype": _name(part.tensor.dtype), "shape": part.shape} for name, part in parts.items()}
        self._index = {"num_ranks": current().size, "metadata": dict(metadata or {}), "tensors": described}
        self._file = file_of_rank(current().rank)
        ours = {name: part for name, part in parts.items() if part.is_first_copy and part.tensor.numel()}
        as_copy: dict[str, Any] = {"copy": True, "memory_format": torch.contiguous_format}
        self._copies = {name: part.tensor.to("cpu", **as_copy) for name, part in ours.items()}
        self._offsets = {name: {"saved_offsets": part.offsets} for name, part in ours.items()}

    def write_index(self, folder: Path) -> None:
        """Make the folder with the index. One rank calls it, before any rank calls `write`."""
        folder.mkdir()
        (folder / INDEX).write_text(json.dumps(self._index, indent=1), encoding="utf-8")

    def write(self, folder: Path) -> Path:
        """Write this rank's file, and free the copies."""
        path = folder / self._file
        # One entry, since safetensors writes several in an order that differs from save to save.
        save_file(self._copies, path, metadata={_OFFSETS: json.dumps(self._offsets)})
        self._copies = {}
        return path


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    file: Any
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedTensor:
    """A tensor in the files of several ranks. Any part of it can be read."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: list[_Piece] = field(default_factory=list, repr=False)

    def __str__(self) -> str:
        return f"the tensor {self.name}"

    def dim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def read(self, offsets: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> Tensor:
        """The part that begins at `offsets` and has `shape`, by default all, on the CPU."""
        offsets = (0,) * len(self.shape) if offsets is None else tuple(offsets)
        shape = self.shape if shape is None else tuple(shape)
        result = torch.empty(shape, dtype=self.dtype)
        ends = [offset + length for offset, length in zip(offsets, shape, strict=True)]
        for piece in self.pieces:
            first = [max(pair) for pair in zip(offsets, piece.offsets, strict=True)]
            last = [min(end, o + n) for end, o, n in zip(ends, piece.offsets, piece.shape, strict=True)]
            if any(begin >= end for begin, end in zip(first, last, strict=True)):
                continue
            source = tuple(slice(b - o, e - o) for b, e, o in zip(first, last, piece.offsets, strict=True))
            target = tuple(slice(b - o, e - o) for b, e, o in zip(first, last, offsets, strict=True))
            if piece.shape:
                result[target] = piece.file.get_slice(self.name)[source]
            else:
                result.copy_(piece.file.get_tensor(self.name))
        return result

    def grown(self, num_rows: int) -> "SavedTensor":
        """The float32 tensor with additional rows, each the mean of all rows, which are read for it once."""
        old, *rest = self.shape
        added = self.read().float().mean(dim=0).expand(num_rows - old, *rest)
        file = SimpleNamespace(get_slice=lambda _: added)
        piece = _Piece(file=file, offsets=(old, *(0 for _ in rest)), shape=tuple(added.shape))
        shape, pieces = (num_rows, *rest), [*self.pieces, piece]
        return SavedTensor(name=self.name, dtype=torch.float32, shape=shape, pieces=pieces)


class SavedShards(dict[str, SavedTensor]):
    """The tensors in a folder of `CapturedShards`, by name. Reads the headers first, and numbers on demand."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError if the folder lacks a part of a tensor or cannot be read."""
        super().__init__()
        try:
            index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            self.metadata: dict[str, Any] = index["metadata"]
            for name, each in index["tensors"].items():
                self[name] = SavedTensor(name=name, dtype=getattr(torch, each["dtype"]), shape=tuple(each["shape"]))
            for rank in range(index["num_ranks"]):
                self._add(folder / file_of_rank(rank))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            raise CheckpointError(f"the shards in {folder} cannot be read: {error}") from error
        for tensor in self.values():
            found = sum(prod(piece.shape) for piece in tensor.pieces)
            if found != prod(tensor.shape):
                raise CheckpointError(
                    f"the shards in {folder} hold {found} of the {prod(tensor.shape)} numbers of {tensor.name}"
                )

    def _add(self, path: Path) -> None:
        file = safe_open(path, framework="pt")
        offsets = json.loads(file.metadata()[_OFFSETS])
        for name in file.keys():  # noqa: SIM118 (it is no mapping)
            piece = _Piece(
                file=file,
                offsets=tuple(offsets[name]["saved_offsets"]),
                shape=tuple(file.get_slice(name).get_shape()),
            )
            self[name].pieces.append(piece)


def saved_tensors_of(file: Path) -> dict[str, SavedTensor]:
    """The tensors of an ordinary safetensors file, by name. Raises SafetensorError or OSError for any other file."""
    opened, found = safe_open(file, framework="pt"), {}
    for name in opened.keys():  # noqa: SIM118 (it is no mapping)
        part = opened.get_slice(name)
        shape = tuple(part.get_shape())
        dtype = (part[:0] if shape else opened.get_tensor(name)).dtype
        piece = _Piece(file=opened, offsets=(0,) * len(shape), shape=shape)
        found[name] = SavedTensor(name=name, dtype=dtype, shape=shape, pieces=[piece])
    return found


@torch.no_grad()
def fill(target: Tensor, saved: Tensor | SavedTensor) -> None:
    """Copy a whole tensor into one of the same shape, which may be sharded over ranks."""
    part = local_part(target)
    if not isinstance(saved, Tensor):
        part.tensor.copy_(saved.read(part.offsets, part.tensor.shape))
        return
    shape = part.tensor.shape
    part.tensor.copy_(saved[tuple(slice(o, o + n) for o, n in zip(part.offsets, shape, strict=True))])


def is_shards(path: Path) -> bool:
    """Whether a path is a folder that `CapturedShards` wrote."""
    return (path / INDEX).is_file()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


INDEX = "shards.json"
"""Lists the tensors in the files of the ranks. A folder with this file holds shards."""


def file_of_rank(rank: int) -> str:
    """The name of the file of one rank."""
    return f"rank-{rank:05d}.safetensors"
