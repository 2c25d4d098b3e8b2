"""Sharding of models over ranks by FSDP2. What a pass computes does not change: gradients are summed, not averaged.

Each layer is gathered when it runs. What is outside the layers (embeddings, final norm, output layer, a value head)
belongs to the root, a module that runs whole passes: no weight of the root is read outside of its `forward`.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingOptions:
    """How a model lies on the ranks of a mesh."""

    keeps_gathered: bool = False
    """Parameters stay gathered from their first use in an update to its last backward pass, not layer by layer."""
    reduces_each_microbatch: bool = False
    """Gradients are summed after each micro-batch, not once per update, so that no rank keeps whole ones."""
    offload: bool = False
    """Parameters, gradients and optimizer state are in the memory of the host."""
    matrix_dtype: torch.dtype | None = None
    """The type in which `matrices` are gathered; None for their own. Their gradients are summed in float32."""


class _Root(nn.Module):
    """FSDP's root. Its forward pass is whatever it is given."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, run: Callable[[], Any]) -> Any:
        return run()


class Sharding:
    """A sharded model: runs its passes, and decides when its parameters are whole and its gradients are summed."""

    def __init__(self, root: _Root, options: ShardingOptions) -> None:
        self._root: Any = root
        self._units = [module for module in root.modules() if isinstance(module, FSDPModule)]
        self._options = options
        self._is_gathered = False

    def run(self, run: Callable[[], Result]) -> Result:
        """Run a pass, which may read any weight of the model. Its result is a tensor, or a tuple that holds them."""
        if self._is_gathered:
            return run()
        return self._root(run)

    def begin_microbatch(self, *, is_last: bool) -> None:
        """Call before each micro-batch of an update: gradients are summed over ranks in the last one."""
        self._root.set_requires_gradient_sync(is_last or self._options.reduces_each_microbatch)
        if self._options.keeps_gathered:
            self._root.set_reshard_after_backward(is_last)

    def release(self) -> None:
        """Free gathered parameters, also after passes without a backward pass."""
        if not self._is_gathered:
            for unit in self._units:
                unit.reshard()

    @contextmanager
    def gathered(self) -> Generator[None]:
        """Inside, each rank has all parameters as plain tensors, for reading; passes inside need no other rank."""
        if self._is_gathered:
            yield
            return
        self.release()
        for unit in self._units:
            unit.unshard()
        self._is_gathered = True
        try:
            yield
        finally:
            self._is_gathered = False
            self.release()


def make_mesh(device: torch.device, *, size: int, shard_size: int | None) -> DeviceMesh:
    """A mesh over all ranks; of two dimensions where models are replicated over groups of `shard_size` ranks."""
    if shard_size is None or shard_size == size:
        return init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (size // shard_size, shard_size), mesh_dim_names=("replicate", "shard"))


def shard(
    modules: Sequence[nn.Module],
    *,
    layers: Sequence[nn.Module],
    matrices: Sequence[nn.Module],
    mesh: DeviceMesh,
    options: ShardingOptions,
) -> Sharding:
    """Shard modules that share passes, such as a policy and its value head, in place.

    `layers`: those to gather one at a time. `matrices`: modules whose own parameters are read in `matrix_dtype` only.
    Each parameter becomes a DTensor, so optimizers and copies are made afterwards and before, in that order.
    """
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if options.offload else OffloadPolicy()
    wrap: dict[str, Any] = {"mesh": mesh, "offload_policy": offload}
    narrow = set(matrices) if options.matrix_dtype is not None else set()
    policy = MixedPrecisionPolicy(
        param_dtype=options.matrix_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for layer in layers:
        inside = [module for module in layer.modules() if module in narrow]
        if inside:
            fully_shard(inside, mp_policy=policy, reshard_after_forward=not options.keeps_gathered, **wrap)
        fully_shard(layer, reshard_after_forward=not options.keeps_gathered, **wrap)
    root = _Root(modules)
    fully_shard(root, reshard_after_forward=False, **wrap)
    for module in root.modules():
        if isinstance(module, FSDPModule):  # neither call recurses
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return Sharding(root, options)


def whole(tensor: Tensor) -> Tensor:
    """A tensor that is not sharded, gathered if it is. Every rank has to call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor on this rank: its shard, or itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
