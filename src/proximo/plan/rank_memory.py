"""Memory of a rank, from the layout of the models and the profiled passes. Formulas: docs/scale.md."""

from collections.abc import Sequence

from proximo.plan.cost_model import Passes, StepCost
from proximo.plan.fake_tensor_profiler import GRADIENTS
from proximo.plan.rank_layout import Layout, PlacedModel
from proximo.plan.static_memory import OptimizedModules

ROOT = "gathered root"
LAYERS = "gathered layers"
REDUCTION = "reduction buffer"


def rank_memory(layout: Layout, optimized: OptimizedModules, cost: StepCost, *, has_own_memory: bool) -> dict[str, int]:
    """Part -> bytes of a rank at the largest moment of a phase: its start, the profiled peak, or its end.

    `has_own_memory`: the device has other memory than the host; where it has not, offloaded parts count too.
    """
    static = _static(layout, optimized, cost, has_own_memory=has_own_memory)
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
    """Whole weights beside a rank's shards. In `full` the layer at work lies there twice: as parameters, and as the
    buffer of its gather, or in a backward pass that of the next one. In `grads` only the first micro-batch gathers.
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
