"""Memory of one rank: weights and optimizer state, how they lie on it, and its bytes at the largest moment of a phase.

The formulas are those of docs/scale.md, and what FSDP2 does: a unit is a decoder layer or the root (everything else); a
tensor is divided along its first dimension, padded to the same number of rows on each rank.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn

from proximo.config.devices import DevicesConfig, Shard
from proximo.config.run import OptimizerConfig
from proximo.learner.optimizers import trainable_parameters
from proximo.models.transformers_model import decoder_layers
from proximo.plan.cost_model import Model, Passes, StepCost, Units
from proximo.plan.fake_tensor_profiler import GRADIENTS
from proximo.plan.record import Role

OptimizedModules = Mapping[str, tuple[Sequence[nn.Module], OptimizerConfig]]
"""Role -> the modules that its optimizer trains, and the optimizer's config."""
_SMALL = 4096
"""bitsandbytes keeps float32 moments for tensors with fewer elements (`min_8bit_size`)."""
_BLOCK = 256
"""Elements of an 8-bit moment that share one float32 scale."""
_BUCKET_BYTES = 64 * 2**20
"""Of gradients that are added up in one collective: distributed/process_group.py."""
_GRADIENT_BYTES = 4
_MOMENT_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """The ranks that a plan is for. One rank: nothing is sharded."""

    num: int
    devices: DevicesConfig

    @property
    def shard_size(self) -> int:
        """Number of ranks that share one copy of a sharded model."""
        return self.devices.shard_size or self.num

    def share(self, count: int) -> int:
        """Of `count` things, the number of the rank with the most."""
        return -(-count // self.num)


ONE_RANK = Ranks(num=1, devices=DevicesConfig())


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Parameters that are gathered and reduced together, in bytes."""

    whole: int
    """Of the parameters, in the types in which they are gathered."""
    gradients: int
    """Of the whole gradients of its trained parameters, in float32."""
    trained: tuple[nn.Parameter, ...]

    @classmethod
    def of(cls, parameters: Sequence[nn.Parameter], narrow: set[int], shard_size: int) -> "Unit":
        """`narrow`: parameters that are gathered in bf16."""
        groups = [[p for p in parameters if (id(p) in narrow) is wanted] for wanted in (True, False)]
        trained = [[p for p in group if p.requires_grad] for group in groups]
        return cls(
            whole=sum(
                shard_size * _shard_numel(p, shard_size) * (2 if id(p) in narrow else p.element_size())
                for p in parameters
            ),
            gradients=sum(_GRADIENT_BYTES * shard_size * _shard_numel(p, shard_size) for g in trained for p in g),
            trained=tuple(p for group in trained for p in group),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedModel:
    """The tensors that are a role's own, as they lie on a rank."""

    section: str
    """The subsection of `devices` that says so."""
    shard: Shard
    offload: Literal["none", "idle", "always"]
    layers: tuple[Unit, ...]
    root: Unit
    weights: int
    """Bytes of a rank's own shards, or of the whole tensors. Shards of frozen tensors belong to the first role."""
    trains: bool

    @property
    def is_sharded(self) -> bool:
        """Whether a rank has only a part of it."""
        return self.shard != "replicate"

    @property
    def whole(self) -> int:
        """Bytes of all gathered units."""
        return self.root.whole + sum(layer.whole for layer in self.layers)

    @property
    def gradients(self) -> int:
        """Bytes of all whole gradients."""
        return self.root.gradients + sum(layer.gradients for layer in self.layers)

    @property
    def buckets(self) -> list[int]:
        """Bytes of each collective that adds up the gradients of a whole model."""
        buckets: list[int] = []
        for parameter in (p for unit in (*self.layers, self.root) for p in unit.trained):
            size = _GRADIENT_BYTES * parameter.numel()
            if buckets and buckets[-1] + size <= _BUCKET_BYTES:
                buckets[-1] += size
            else:
                buckets.append(size)
        return buckets

    @property
    def largest(self) -> int:
        """Bytes of the largest gathered layer."""
        return max((layer.whole for layer in self.layers), default=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The models of a run on a rank."""

    ranks: Ranks
    models: Mapping[str, PlacedModel]
    """Role -> the tensors that no role before it has."""
    roles: Mapping[int, str]
    """id of a module that runs -> its role."""
    owners: Mapping[int, str]
    """id of a parameter -> the role whose optimizer has it."""

    def used_by(self, modules: Sequence[nn.Module]) -> list[str]:
        """The roles whose weights these modules are."""
        return list(dict.fromkeys(self.roles[id(module)] for module in modules))

    def moment_bytes(self, modules: Sequence[nn.Module], config: OptimizerConfig) -> int:
        """Bytes of the optimizer state of these modules on a rank."""
        parameters = {id(p): p for module in modules for p in trainable_parameters(module).values()}
        size = {key: self._shard_size(self.owners[key]) for key in parameters}
        if all(each == 1 for each in size.values()):
            return optimizer_bytes(modules, config)
        return sum(2 * _MOMENT_BYTES * _shard_numel(p, size[key]) + 4 for key, p in parameters.items())

    def _shard_size(self, role: str) -> int:
        return self.ranks.shard_size if self.models[role].is_sharded else 1

    def reduced(self, modules: Sequence[nn.Module], *, rounds: int, in_backward: bool) -> Units | None:
        """What becomes of the gradients of these modules in an update of `rounds` micro-batches."""
        placed = [self.models[role] for role in self.used_by(modules)]
        if not any(model.is_sharded for model in placed):
            return None
        whole = rounds > 1 and self.ranks.devices.reduce_gradients == "update"

        def kept(unit: Unit, model: PlacedModel) -> int:
            if in_backward or (not whole and model.offload == "always"):
                return 0
            return unit.gradients if whole else unit.gradients // self.ranks.shard_size

        layers = [(layer, model) for model in placed if model.is_sharded for layer in model.layers if layer.trained]
        return [(layer.trained, kept(layer, model)) for layer, model in layers]


def lay_out(models: Mapping[str, Model], ranks: Ranks, role_of: Callable[[str], str]) -> Layout:
    """The layout of models without weights. Matrices of sharded models under bf16 become bf16, as they are gathered.

    `role_of`: the subsection of `devices` of a role of the run.
    """
    placed, roles, owners = dict[str, PlacedModel](), dict[int, str](), dict[int, str]()
    common = set[tuple[int, str]]()
    narrow: dict[int, nn.Parameter] = {}
    bodies: dict[int, str] = {}
    for name, model in models.items():
        trunk = bodies.setdefault(id(model.backbone.layers), name)
        section = role_of(trunk)
        is_sharded = ranks.num > 1 and ranks.devices.shard_of(section) != "replicate"
        # A sharded model gathers by itself what it has in common with another one.
        whole = {id(p) for p in models[trunk].model.parameters()} if trunk != name else set[int]()
        known = whole if is_sharded else owners
        own = [p for p in model.model.parameters() if id(p) not in known]
        placed[name] = _placed(model, own, ranks, section, narrow=narrow, common=common)
        owners = {id(p): name for p in model.model.parameters()} | owners
        heads = [module for module in model.model.modules() if module is not model.backbone.layers]
        roles |= {id(module): name for module in heads if id(module) not in roles}
    for parameter in narrow.values():
        parameter.data = torch.empty(parameter.shape, dtype=torch.bfloat16)
    return Layout(ranks=ranks, models=placed, roles=roles, owners=owners)


def _placed(
    model: Model,
    own: Sequence[nn.Parameter],
    ranks: Ranks,
    section: str,
    *,
    narrow: dict[int, nn.Parameter],
    common: set[tuple[int, str]],
) -> PlacedModel:
    """`common`: id of a buffer, or of a frozen tensor and its place, of the models before; this one's are added."""
    shard: Shard = "replicate" if ranks.num == 1 else ranks.devices.shard_of(section)
    size = 1 if shard == "replicate" else ranks.shard_size
    fresh = {id(p) for p in own}
    if size > 1 and model.precision.is_half:
        narrow |= {id(p): p for p in model.backbone.matrices if id(p) in fresh}
    stack = list(decoder_layers(model.base)) if ranks.num > 1 else []
    inside = [[p for p in layer.parameters() if id(p) in fresh] for layer in stack]
    in_layers = {id(p) for layer in inside for p in layer}
    buffers = {id(b): b.untyped_storage().nbytes() for b in model.model.buffers() if (id(b), "buffer") not in common}
    common.update((key, "buffer") for key in buffers)
    offload = "none" if ranks.num == 1 else ranks.devices.offload_of(section)
    trains = any(p.requires_grad for p in own)
    place = "none" if trains and offload == "idle" else offload
    shards = {id(p): _shard_numel(p, size) * p.element_size() for p in own}
    known = {key for key in shards if (key, place) in common}
    if shard != "replicate" and place != "idle":
        common.update((id(p), place) for p in own if not p.requires_grad and p.dim() and p.shape[0] % size == 0)
    return PlacedModel(
        section=section,
        shard=shard,
        offload=offload,
        layers=tuple(Unit.of(layer, set(narrow), size) for layer in inside),
        root=Unit.of([p for p in own if id(p) not in in_layers], set(narrow), size),
        weights=sum(buffers.values()) + sum(nbytes for key, nbytes in shards.items() if key not in known),
        trains=trains,
    )


def _shard_numel(tensor: Tensor, shard_size: int) -> int:
    """Numbers of a padded shard."""
    if tensor.dim() == 0 or shard_size == 1:
        return tensor.numel()
    return -(-tensor.shape[0] // shard_size) * prod(tensor.shape[1:])


ROOT = "gathered root"
LAYERS = "gathered layers"
REDUCTION = "reduction buffer"


def rank_memory(layout: Layout, optimized: OptimizedModules, cost: StepCost, *, has_own_memory: bool) -> dict[str, int]:
    """Part -> bytes of a rank at the largest moment of a phase: its start, the profiled peak, or its end.

    `has_own_memory`: the device has other memory than the host; where it has not, offloaded parts count too.
    """
    static = _static(layout, optimized, cost, has_own_memory=has_own_memory)
    if layout.ranks.num == 1:
        return static | dict(cost.parts)
    moments = [dict(static)]
    for passes in cost.passes:
        used = [layout.models[role] for role in layout.used_by(passes.modules)]
        sharded = [model for model in used if model.is_sharded]
        moments.append(static | dict(cost.parts) | _gathered(sharded, passes) | _in_flight(sharded, passes))
        moments.append(static | _first_gather(sharded, passes, layout))
        if passes.kind == "train":
            moments.append(static | _end_of_backward(used, layout))
    largest = max(moments, key=lambda parts: sum(parts.values()))
    return {name: size for name, size in largest.items() if size}


def _static(layout: Layout, optimized: OptimizedModules, cost: StepCost, *, has_own_memory: bool) -> dict[str, int]:
    in_use = set(layout.used_by([module for passes in cost.passes for module in passes.modules]))
    parts = {}
    for role, model in layout.models.items():
        away = model.offload == "always" or (model.offload == "idle" and not model.trains and role not in in_use)
        parts[f"{role} weights"] = 0 if away and has_own_memory else model.weights
    for role, (modules, config) in optimized.items():
        away = has_own_memory and layout.models[layout.used_by(modules)[0]].offload == "always"
        parts[f"{role} optimizer"] = 0 if away else layout.moment_bytes(modules, config)
    return {name: size for name, size in parts.items() if size}


def _gathered(sharded: Sequence[PlacedModel], passes: Passes) -> dict[str, int]:
    """Whole weights beside a rank's shards.

    In `full` two layers' worth: the parameters of the layer that computes, and the buffer into which it was gathered,
    or in a backward pass the next layer is. In `grads` all layers, and that buffer during the first micro-batch.
    """
    layers = 0
    for model in sharded:
        if passes.kind == "rollout" or model.shard == "grads":
            layers += model.whole - model.root.whole
        if passes.kind != "rollout" and model.shard == "grads" and passes.microbatches == 1:
            layers += model.largest
        if passes.kind != "rollout" and model.shard == "full":
            layers += 2 * model.largest
    return {ROOT: sum(m.root.whole for m in sharded), LAYERS: layers}


def _in_flight(sharded: Sequence[PlacedModel], passes: Passes) -> dict[str, int]:
    """Gradients of one layer on their way: in the buffer of its reduction."""
    if passes.kind != "train":
        return {}
    return {REDUCTION: max((layer.gradients for model in sharded for layer in model.layers), default=0)}


def _first_gather(sharded: Sequence[PlacedModel], passes: Passes, layout: Layout) -> dict[str, int]:
    """The start of a pass: the root, the buffer of its gather, and that of the first layer."""
    kept = 0
    if passes.kind == "train" and passes.microbatches > 1:
        whole = layout.ranks.devices.reduce_gradients == "update"
        kept = sum(m.gradients if whole else m.gradients // layout.ranks.shard_size for m in sharded)
    root = sum(m.root.whole for m in sharded)
    return {ROOT: 2 * root, LAYERS: sum(m.largest for m in sharded), GRADIENTS: kept}


def _end_of_backward(used: Sequence[PlacedModel], layout: Layout) -> dict[str, int]:
    """All gradients, and what adds up the last ones: those of the root, or a bucket of those of a whole model."""
    gradients = buffer = 0
    for model in used:
        if model.is_sharded:
            layers = (model.gradients - model.root.gradients) // layout.ranks.shard_size
            gradients += model.root.gradients + (0 if model.offload == "always" else layers)
            buffer += model.root.gradients
        else:
            gradients += model.gradients
            buffer += max(model.buckets, default=0) if layout.ranks.num > 1 else 0
    return {GRADIENTS: gradients, REDUCTION: buffer}


def host_bytes(layout: Layout, optimized: OptimizedModules) -> int:
    """Bytes of a rank in its host's memory."""
    size = sum(model.weights for model in layout.models.values() if model.offload == "always")
    size += sum(m.weights for m in layout.models.values() if m.offload == "idle" and not m.trains)
    for modules, config in optimized.values():
        owner = layout.models[layout.used_by(modules)[0]]
        if owner.offload == "always":
            size += layout.moment_bytes(modules, config) + owner.gradients // layout.ranks.shard_size
    return size


def optimizer_bytes(modules: Sequence[nn.Module], config: OptimizerConfig) -> int:
    """Bytes of both Adam moments of the trainable parameters, with the step counters or the scales of 8-bit blocks."""
    moments = _float32_moments if config.kind == "adamw" else _moments_of_8_bits
    return sum(moments(tensor) for module in modules for tensor in trainable_parameters(module).values())


def role_sizes(models: Mapping[str, Model]) -> tuple[Role, ...]:
    """Parameter counts of each role."""
    roles, seen = [], set[int]()
    for name, model in models.items():
        own = [p for p in model.model.parameters() if id(p) not in seen]
        count = sum(p.numel() for p in model.model.parameters())
        roles.append(
            Role(
                name=name,
                architecture=model.base.config.model_type,
                parameters=count,
                shared_parameters=count - sum(p.numel() for p in own),
                trained_parameters=sum(p.numel() for p in own if p.requires_grad),
            )
        )
        seen |= {id(p) for p in own}
    return tuple(roles)


def _float32_moments(tensor: Tensor) -> int:
    return 2 * tensor.numel() * tensor.element_size() + 4


def _moments_of_8_bits(tensor: Tensor) -> int:
    if tensor.numel() < _SMALL:
        return 2 * 4 * tensor.numel()
    return 2 * (tensor.numel() + 4 * -(-tensor.numel() // _BLOCK))
