"""Parameters whose numbers are still in the files of a model. They take no memory until a rank reads its part.

A model that is loaded by shards has such parameters from its loading until its sharding. Copies have the same source,
and each copy reads it separately. Code that needs the numbers in between calls `numbers_of`.
"""

import math
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from proximo.distributed.shard_files import SavedTensor


class Unread(nn.Parameter):
    """A parameter on the CPU whose elements are one NaN in memory, until it is read in place or as shards of FSDP."""

    source: SavedTensor

    @classmethod
    def of(cls, source: SavedTensor, *, dtype: torch.dtype = torch.float32, requires_grad: bool = True) -> "Unread":
        """An unread parameter with this source. Its numbers may have another dtype there."""
        made = torch.Tensor._make_subclass(cls, _nothing(source.shape, dtype), requires_grad)
        made.source = source
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = Unread.of(self.source, dtype=self.dtype, requires_grad=self.requires_grad)
        return memo[id(self)]


DESTROYED = (
    "the model was destroyed in training or its file was damaged; take an earlier checkpoint, or fetch the file again"
)


def num_not_finite(tensor: Tensor) -> int:
    """How many numbers of a tensor are NaN or infinite. They are counted only if the sum is not finite."""
    if not tensor.is_floating_point() or tensor.sum().isfinite():
        return 0
    return int((~tensor.isfinite()).sum())


def source_of(tensor: Tensor | None) -> SavedTensor | None:
    """The source of an unread parameter; None for any other tensor."""
    return tensor.source if isinstance(tensor, Unread) else None


def unread_in(modules: Iterable[nn.Module]) -> list[tuple[Unread, SavedTensor]]:
    """The unread parameters of modules, each once."""
    found = dict.fromkeys(parameter for module in modules for parameter in module.parameters())
    return [(each, each.source) for each in found if isinstance(each, Unread)]


@torch.no_grad()
def numbers_of(tensor: Tensor) -> Tensor:
    """A tensor with its numbers: the tensor itself, or a copy that was read for this call."""
    source = source_of(tensor)
    return tensor if source is None else source.read().to(tensor.dtype)


@torch.no_grad()
def read_all(module: nn.Module, device: torch.device | None = None) -> None:
    """Read all parameters whole, one at a time, to `device`; None for the CPU.

    They become plain parameters, which kernels need.
    """
    for parameter, source in unread_in([module]):
        parameter.data = source.read().to(device=device, dtype=parameter.dtype)
        del parameter.source
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
def _take(parameters: Iterable[tuple[Unread, SavedTensor]]) -> None:
    for parameter, source in parameters:
        parameter.data = source.read().to(parameter.dtype)


def _give_back(parameters: Iterable[tuple[Unread, SavedTensor]]) -> None:
    for parameter, source in parameters:
        parameter.data = _nothing(source.shape, parameter.dtype)


def _nothing(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.full((), math.nan, dtype=dtype).expand(tuple(shape))
