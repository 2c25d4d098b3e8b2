"""Sends the weights of a sharded policy to an engine of rank 0. One layer at a time is gathered on request, so that the
whole model is never in memory.
"""

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from proximo.distributed.shard_files import is_sharded, local_part
from proximo.distributed.world import alone, current, whole
from proximo.rollout.engine import Fingerprint, distance_of_entries

Result = TypeVar("Result")
WHAT = "loading weights into the engine"
_LAYER = re.compile(r".*?\.\d+(?=\.)")


class StreamedWeights(Mapping[str, Tensor]):
    """Sharded tensors by name. Rank 0 may ask for them inside `give`."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self._sharded = {name for name, tensor in self._tensors.items() if is_sharded(tensor)}
        self._world = current()
        self._gathered: dict[str, Tensor] = {}
        self._asking = threading.Lock()

    def give(self, run: Callable[[], Result]) -> Result:
        """Run on rank 0 the function that asks for tensors; other ranks help to gather them. Every rank has to call it,
        and gets the result.
        """
        if not self._world.leads:
            while True:
                said: _Gather | _End[Result] = self._world.once(_of_rank_0, what=WHAT)
                if isinstance(said, _End):
                    return said.result
                self._gather(said.layer)
        try:
            with alone():
                end = _End(run())
        except BaseException as error:
            failure = error
            self._world.once(lambda: _raise(failure), what=WHAT)
            raise
        finally:
            self._gathered = {}
        return self._world.once(lambda: end, what=WHAT).result

    def fingerprint(self) -> str:
        """The fingerprint of the whole tensors. No rank needs more than its parts. Every rank has to call it."""
        ours = {name: _entries_here(self._tensors[name]) for name in self._sharded}
        found, shares = Fingerprint(), self._world.gather(ours, what="the fingerprint of weights")
        for name, tensor in self._tensors.items():
            if name not in ours:
                found.add(name, tensor)
                continue
            entries = torch.empty(-(-tensor.numel() // distance_of_entries(tensor.numel())), dtype=tensor.dtype)
            for share in shares:
                places, numbers = share[name]
                entries[places] = numbers
            found.add_entries(name, tensor, entries.to(tensor.device))
        return found.hexdigest()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._sharded:
            return self._tensors[name]
        with self._asking:
            if name not in self._gathered:
                layer = _layer_of(name)
                self._world.once(lambda: _Gather(layer), what=WHAT)
                self._gathered = self._gather(layer)
            return self._gathered[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @torch.no_grad()
    def _gather(self, layer: str) -> dict[str, Tensor]:
        self._gathered = {}  # not two layers at a time
        return {
            name: whole(tensor)
            for name, tensor in self._tensors.items()  # in the order of the model, on every rank
            if name in self._sharded and _layer_of(name) == layer
        }


@dataclass(frozen=True, slots=True)
class _Gather:
    """Message of rank 0: gather the layer of a tensor."""

    layer: str


@dataclass(frozen=True, slots=True)
class _End(Generic[Result]):
    """Message of rank 0: no further tensor is needed, with the result."""

    result: Result


@torch.no_grad()
def _entries_here(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The entries of a tensor's fingerprint on this rank: their indices among all entries, and their values."""
    part, size = local_part(tensor), tensor.numel()
    flat = torch.arange(0, size, distance_of_entries(size))
    inside, places = torch.ones(len(flat), dtype=torch.bool), list[Tensor]()
    for index, offset, length in zip(
        torch.unravel_index(flat, part.shape), part.offsets, part.tensor.shape, strict=True
    ):
        inside &= (index >= offset) & (index < offset + length)
        places.append(index - offset)
    local = part.tensor[tuple(place[inside].to(part.tensor.device) for place in places)]
    return inside.nonzero()[:, 0], local.cpu()


def _layer_of(name: str) -> str:
    """The unit that is gathered together: the tensors of a layer, or one outside of the layers."""
    found = _LAYER.match(name)
    return name if found is None else found[0]


def _raise(error: BaseException) -> None:
    raise error


def _of_rank_0() -> Any:
    raise AssertionError("only rank 0 names the next layer to gather")
