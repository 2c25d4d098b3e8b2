"""Bytes of weights and optimizer state, which are held in every phase. Memory of passes: cost_model.py."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from proximo.config.run import OptimizerConfig
from proximo.learner.optimizers import trainable_parameters
from proximo.plan.cost_model import Model
from proximo.plan.record import Role

OptimizedModules = Mapping[str, tuple[Sequence[nn.Module], OptimizerConfig]]
"""Role -> the modules that its optimizer trains, and the optimizer's config."""
_SMALL = 4096
"""bitsandbytes keeps float32 moments for tensors with fewer elements (`min_8bit_size`)."""
_BLOCK = 256
"""Elements of an 8-bit moment that share one float32 scale."""


def static_bytes(models: Mapping[str, Model], optimized: OptimizedModules) -> dict[str, int]:
    """Part -> bytes that are held in every phase. A shared storage counts for the first role that holds it."""
    parts, seen = {}, set[int]()
    for role, model in models.items():
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in _tensors(model)}
        parts[f"{role} weights"] = sum(size for key, size in storages.items() if key not in seen)
        seen |= storages.keys()
    for role, (modules, optimizer) in optimized.items():
        parts[f"{role} optimizer"] = optimizer_bytes(modules, optimizer)
    return {name: size for name, size in parts.items() if size}


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
                shared=count - sum(p.numel() for p in own),
                trained=sum(p.numel() for p in own if p.requires_grad),
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


def _tensors(model: Model) -> list[Tensor]:
    return [*model.model.parameters(), *model.model.buffers()]
