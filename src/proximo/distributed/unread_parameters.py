"""Parameters whose numbers are still in the files of a model. They take no memory until a rank reads its part.

A model that is loaded by shards has such parameters from its loading until its sharding. Copies have the same source,
and each copy reads it separately. Code that needs the numbers in between calls `numbers_of`.
"""

import math
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Source(Protocol):
    """The place of a parameter's numbers in files."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def __str__(self) -> str:
        """Its name in messages."""
        ...

    def read(self, offsets: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> Tensor:
        """The part that begins at `offsets` and has `shape`, by default all, on the CPU."""
        ...


class Unread(nn.Parameter):
    """A parameter on the CPU whose elements are one NaN in memory, until it is read in place or as shards of FSDP."""

    source: Source | None = None
    """None after it was read."""

    @classmethod
    def of(cls, source: Source, *, dtype: torch.dtype = torch.float32, requires_grad: bool = True) -> "Unread":
        """An unread parameter with this source. Its numbers may have another dtype there."""
        made = torch.Tensor._make_subclass(cls, _nothing(source.shape, dtype), requires_grad)
        made.source = source
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            if self.source is None:
                memo[id(self)] = nn.Parameter(self.data.clone(), self.requires_grad)
            else:
                memo[id(self)] = Unread.of(self.source, dtype=self.dtype, requires_grad=self.requires_grad)
        return memo[id(self)]


class Grown:
    """A table with additional rows. Each is the mean of the rows in the files."""

    dtype = torch.float32

    def __init__(self, source: Source, num_rows: int) -> None:
        self.shape = (num_rows, *source.shape[1:])
        self._source = source
        self._mean = source.read().float().mean(dim=0)

    def __str__(self) -> str:
        return str(self._source)

    def read(self, offsets: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> Tensor:
        """The part that begins at `offsets` and has `shape`, by default all, on the CPU."""
        first, *others = offsets or (0,) * len(self.shape)
        count, *rest = self.shape if shape is None else shape
        old = min(max(self._source.shape[0] - first, 0), count)
        result = torch.empty((count, *rest), dtype=self.dtype)
        if old:
            result[:old] = self._source.read((first, *others), (old, *rest))
        result[old:] = self._mean[tuple(slice(o, o + n) for o, n in zip(others, rest, strict=True))]
        return result


DESTROYED = (
    "the model was destroyed in training or its file was damaged; take an earlier checkpoint, or fetch the file again"
)


def num_not_finite(tensor: Tensor) -> int:
    """How many numbers of a tensor are NaN or infinite. They are counted only if the sum is not finite."""
    if not tensor.is_floating_point() or tensor.sum().isfinite():
        return 0
    return int((~tensor.isfinite()).sum())


def source_of(tensor: Tensor | None) -> Source | None:
    """The source of an unread parameter; None for any other tensor."""
    return tensor.source if isinstance(tensor, Unread) else None


def unread_in(modules: Iterable[nn.Module]) -> list[tuple[Unread, Source]]:
    """The unread parameters of modules, each once."""
    found = dict.fromkeys(parameter for module in modules for parameter in module.parameters())
    return [(each, each.source) for each in found if isinstance(each, Unread) and each.source is not None]


@torch.no_grad()
def numbers_of(tensor: Tensor) -> Tensor:
    """A tensor with its numbers: the tensor itself, or a copy that was read for this call."""
    source = source_of(tensor)
    return tensor if source is None else source.read().to(tensor.dtype)


@torch.no_grad()
def read_all(module: nn.Module, device: torch.device | None = None) -> None:
    """Read all parameters whole, one at a time, to `device`; None for the CPU."""
    for parameter, _ in unread_in([module]):
        read_whole(parameter, device)


@torch.no_grad()
def read_whole(parameter: nn.Parameter, device: torch.device | None = None) -> None:
    """Read a parameter to `device`, None for the CPU. It becomes a plain parameter, which kernels need."""
    if isinstance(parameter, Unread) and parameter.source is not None:
        parameter.data = parameter.source.read().to(device=device, dtype=parameter.dtype)
        parameter.source = None
        parameter.__class__ = nn.Parameter


@torch.no_grad()
def cast(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Change the dtype of a parameter in place."""
    source = source_of(parameter)
    parameter.data = parameter.data.to(dtype) if source is None else _nothing(source.shape, dtype)


@contextmanager
def reading_when_run(module: nn.Module, layers: Sequence[nn.Module]) -> Generator[None]:
    """Inside, each layer has its numbers while it runs, and the rest of the module has them all the time."""
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    rest = [(parameter, source) for parameter, source in unread_in([module]) if id(parameter) not in inside]
    handles = []
    for layer in layers:
        own = unread_in([layer])
        handles.append(layer.register_forward_pre_hook(lambda *_, own=own: _take(own)))
        handles.append(layer.register_forward_hook(lambda *_, own=own: _give_back(own), always_call=True))
    _take(rest)
    try:
        yield
    finally:
        _give_back(rest)
        for handle in handles:
            handle.remove()


@torch.no_grad()
def _take(parameters: Iterable[tuple[Unread, Source]]) -> None:
    for parameter, source in parameters:
        parameter.data = source.read().to(parameter.dtype)


def _give_back(parameters: Iterable[tuple[Unread, Source]]) -> None:
    for parameter, source in parameters:
        parameter.data = _nothing(source.shape, parameter.dtype)


def _nothing(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.full((), math.nan, dtype=dtype).expand(tuple(shape))
