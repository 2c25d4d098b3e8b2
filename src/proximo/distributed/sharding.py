"""Shards models over ranks by FSDP2. Passes compute the same as before: gradients are summed, not averaged.

Each layer is gathered when it runs. All other weights (embeddings, final norm, output layer, a value head) belong to
the root, a module that runs whole passes. Nothing outside its `forward` reads a weight of the root.
"""

from collections.abc import Callable, Collection, Generator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from proximo.distributed.shard_files import SavedTensor, fill
from proximo.distributed.unread_parameters import DESTROYED, Unread, num_not_finite, source_of
from proximo.distributed.world import World, local
from proximo.errors import ConfigError, ModelError

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingOptions:
    """How a model is sharded over the ranks of a mesh."""

    keeps_gathered: bool = False
    """Parameters stay gathered from their first use in an update to its last backward pass, not layer by layer."""
    reduces_each_microbatch: bool = False
    """Gradients are summed after each micro-batch, not once per update, so that no rank keeps whole ones."""
    offload: bool = False
    """Parameters, gradients and optimizer state are kept in host memory."""
    leaves_device: bool = False
    """The model is moved to the host and back, so it shares shards with no other model."""
    matrix_dtype: torch.dtype | None = None
    """The dtype in which `matrices` are gathered; None for that of the matrices. Gradients are summed in float32."""


class _Root(nn.Module):
    """FSDP's root. Its forward pass runs the given function."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, run: Callable[[], Any]) -> Any:
        return run()


class Sharding:
    """A sharded model: runs its passes, and decides when its parameters are whole and its gradients are summed."""

    def __init__(self, root: _Root, options: ShardingOptions, *, num_copies: int) -> None:
        self._num_copies = num_copies
        self._root: Any = root
        self._units = [module for module in root.modules() if isinstance(module, FSDPModule)]
        self._options = options
        self._is_gathered = False

    def run(self, run: Callable[[], Result]) -> Result:
        """Run a pass, which may read any weight of the model. It returns a tensor or a tuple with tensors."""
        if self._is_gathered:
            return run()
        return self._root(run)

    @property
    def module(self) -> nn.Module:
        """The module that holds all shards, for moving them to another device."""
        return self._root

    @property
    def num_copies(self) -> int:
        """Number of ranks that hold the same shard: above 1 in hybrid sharding."""
        return self._num_copies

    def begin_microbatch(self, *, is_last: bool) -> None:
        """Call before each micro-batch of an update. Gradients are summed over ranks in the last one."""
        self._root.set_requires_gradient_sync(is_last or self._options.reduces_each_microbatch)
        if self._options.keeps_gathered:
            self._root.set_reshard_after_backward(is_last)

    def release(self) -> None:
        """Free gathered parameters, also after passes without a backward pass."""
        if self._is_gathered:
            return
        for unit in self._units:
            unit.reshard()
        _forget_passes(self._root)

    @contextmanager
    def gathered(self) -> Generator[None]:
        """Inside, each rank has all parameters as plain tensors, for reading. Passes inside need no other rank."""
        if self._is_gathered:
            yield
            return
        self.release()
        with torch.no_grad():  # FSDP wants its first pass to be the root's
            self._root(lambda: None)
        for unit in self._units:
            unit.unshard()
        # Otherwise each layer would free its parameters after a pass, and the next pass would wait for other ranks.
        self._root.set_reshard_after_forward(False)
        self._is_gathered = True
        try:
            yield
        finally:
            self._is_gathered = False
            for unit in self._units:
                keeps = unit is self._root or self._options.keeps_gathered
                unit.set_reshard_after_forward(not keeps, recurse=False)
            self.release()


def _forget_passes(root: Any) -> None:
    """Drop the passes that FSDP noted for a backward pass. Without one, the notes would grow during the whole run."""
    noted: list[Any] = getattr(root._get_fsdp_state()._comm_ctx, "post_forward_order", [])  # none before the first pass
    for group in noted:
        group._post_forward_indices.clear()
    noted.clear()


def _fix_order(units: Sequence[Any]) -> None:
    """Have each unit gather the one that runs next in the backward pass. `units`: in the order of the forward pass.

    FSDP's default is the unit that ran before in the forward passes of this rank. A rank with less to sample has run
    other units, and would wait for another layer than the rest. Below the first unit that trains there is no backward
    pass; a unit there gathers itself, which costs nothing.
    """
    first = next((number for number, unit in enumerate(units) if _trains(unit)), len(units))
    for number, unit in enumerate(units):
        unit.set_modules_to_backward_prefetch([units[number - 1] if number > first else unit])


def _trains(unit: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in unit.parameters())


@contextmanager
def _reading(module: nn.Module, mesh: DeviceMesh) -> Generator[None]:
    """Encloses the sharding of a module: each rank reads only its shard of parameters that are still in files.

    Raises ModelError for numbers that are not finite.
    """
    places = _make_memory(module, mesh.device_type)
    yield
    for inner, name, source in places:
        fill(parameter := getattr(inner, name), source)
        if count := num_not_finite(local(parameter)):
            raise ModelError(f"{source} holds {count} values that are not finite (NaN or infinite): {DESTROYED}")


def _make_memory(module: nn.Module, device: str) -> list[tuple[nn.Module, str, SavedTensor]]:
    """Give unread parameters memory of the whole size, from which FSDP cuts its shards.

    Nothing writes to that memory, so the host never allocates it. Returns the owner of each parameter, once.
    """
    places = {}
    for inner in module.modules():
        for name, parameter in inner.named_parameters(recurse=False):
            source = source_of(parameter)
            if source is not None and id(parameter) not in places:
                places[id(parameter)] = inner, name, source
                parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    return list(places.values())


_meshes: WeakKeyDictionary[World, dict[tuple[str, int], DeviceMesh]] = WeakKeyDictionary()


def mesh_of(world: World, device: torch.device, *, shard_size: int | None) -> DeviceMesh:
    """The mesh over all ranks. It has two dimensions if models are replicated over groups of `shard_size` ranks.

    Its groups have the time limit of the world. Raises ConfigError if `shard_size` does not divide the ranks.
    """
    size = world.size if shard_size is None else shard_size
    if world.size % size:
        raise ConfigError(
            f"devices.shard_size {size} must divide the number of ranks, which is {world.size}: take a divisor, or "
            "leave it out"
        )
    meshes = _meshes.setdefault(world, {})
    if (device.type, size) not in meshes:
        meshes[device.type, size] = _make_mesh(world, device.type, size)
    return meshes[device.type, size]


def _make_mesh(world: World, device_type: str, size: int) -> DeviceMesh:
    if size == world.size:
        everyone = dist.group.WORLD
        assert everyone is not None
        return DeviceMesh.from_group(everyone, device_type, mesh_dim_names=("shard",))
    # By hand, since groups that a mesh makes have torch's default timeout.
    mesh, timeout = torch.arange(world.size).view(-1, size), timedelta(seconds=world.timeout_seconds)
    groups = [
        dist.new_subgroups_by_enumeration(members, timeout=timeout)[0] for members in (mesh.t().tolist(), mesh.tolist())
    ]
    return DeviceMesh.from_group(groups, device_type, mesh=mesh, mesh_dim_names=("replicate", "shard"))


_shards: MutableMapping[Tensor, nn.Parameter] = WeakTensorKeyDictionary()
"""Frozen tensor of several models -> the shards of it that the first model got."""


class _Common:
    """Tensors shared between models that are sharded separately.

    The model gets new parameters over the same memory. Otherwise a tensor that moved to a device for one model would
    stay there whole until the last model is sharded. Afterwards the models share the shards of frozen tensors.
    """

    def __init__(self, modules: Sequence[nn.Module], others: Collection[int], *, shares: bool) -> None:
        """`others`: ids of the parameters of models that are still whole. `shares`: whether models may share shards."""
        self._shares = shares
        self._left: list[tuple[nn.Parameter, nn.Module, str]] = []
        own: dict[int, nn.Parameter] = {}
        for module in (each for outer in modules for each in outer.modules()):
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) in others or parameter in _shards:
                    source = source_of(parameter)
                    fresh = (
                        nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
                        if source is None
                        else Unread.of(source, dtype=parameter.dtype, requires_grad=parameter.requires_grad)
                    )
                    setattr(module, name, own.setdefault(id(parameter), fresh))
                    self._left.append((parameter, module, name))

    def unify(self) -> None:
        """Use the shards of the models before, or note those of this model for the models that follow."""
        left, self._left = self._left, []  # whole tensors are held no longer than needed
        for whole, module, name in left:
            shards: nn.Parameter = getattr(module, name)
            if not isinstance(shards, DTensor):
                self._left.append((whole, module, name))
            elif self._shares and not whole.requires_grad:
                first = _shards.setdefault(whole, shards)
                if first is not shards and _are_alike(first, shards):
                    module.load_state_dict({name: first}, strict=False, assign=True)


def _are_alike(first: Tensor, second: Tensor) -> bool:
    """Whether shards have the same layout and place. FSDP copies shards of other lengths to pad them."""
    assert isinstance(first, DTensor)
    assert isinstance(second, DTensor)
    mesh = first.device_mesh
    return (
        mesh == second.device_mesh
        and first.placements == second.placements
        and first.dtype == second.dtype
        and first.to_local().device == second.to_local().device
        and first.shape[0] % mesh.size(mesh.ndim - 1) == 0
    )


def shard(
    modules: Sequence[nn.Module],
    *,
    layers: Sequence[nn.Module],
    matrices: Sequence[nn.Module],
    mesh: DeviceMesh,
    options: ShardingOptions,
    others: Collection[int] = (),
) -> Sharding:
    """Shard modules that share passes (a policy and its value head) in place.

    `layers`: modules to gather one at a time. `matrices`: modules whose own parameters are read in `matrix_dtype` only.
    `others`: ids of parameters of other models, which may share them with these modules.
    Each parameter becomes a DTensor, so make copies of the model before and optimizers afterwards.
    """
    common = _Common(modules, others, shares=not options.leaves_device)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if options.offload else OffloadPolicy()
    wrap: dict[str, Any] = {"mesh": mesh, "offload_policy": offload}
    narrow = set(matrices) if options.matrix_dtype is not None else set()
    policy = MixedPrecisionPolicy(
        param_dtype=options.matrix_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    units: list[Any] = []
    for layer in layers:
        inside = [module for module in layer.modules() if module in narrow]
        with _reading(layer, mesh):
            if inside:
                fully_shard(inside, mp_policy=policy, reshard_after_forward=not options.keeps_gathered, **wrap)
                units.append(inside[0])  # one for all of them
            units.append(fully_shard(layer, reshard_after_forward=not options.keeps_gathered, **wrap))
        common.unify()
    root = _Root(modules)
    with _reading(root, mesh):
        fully_shard(root, reshard_after_forward=False, **wrap)
    common.unify()
    _fix_order([*units, root])
    for module in root.modules():
        if isinstance(module, FSDPModule):  # neither call recurses
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return Sharding(root, options, num_copies=mesh.size(0) if mesh.ndim == 2 else 1)
