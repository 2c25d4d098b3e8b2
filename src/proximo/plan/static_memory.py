"""Bytes of weights and optimizer state that a run holds in every phase, shared ones once. Not those of passes."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from proximo.config.run import OptimizerConfig
from proximo.learner.optimizer import trainable_parameters
from proximo.models.language import LanguageModel
from proximo.models.scalar import ScalarModel
from proximo.plan.record import Role

Model = LanguageModel | ScalarModel
Learning = Mapping[str, tuple[Sequence[nn.Module], OptimizerConfig]]
"""Role -> what its optimizer moves, and which one that is."""
_SMALL = 4096
"""bitsandbytes keeps float32 moments of tensors with fewer numbers (`min_8bit_size`)."""
_BLOCK = 256
"""Numbers of a moment that share a float32 scale."""


def held_bytes(models: Mapping[str, Model], learning: Learning) -> dict[str, int]:
    """Part -> bytes that are held in every phase."""
    parts, seen = {}, set[int]()
    for role, model in models.items():
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in _tensors(model)}
        parts[f"{role} weights"] = sum(size for key, size in storages.items() if key not in seen)
        seen |= storages.keys()
    for role, (modules, optimizer) in learning.items():
        parts[f"{role} optimizer"] = optimizer_bytes(modules, optimizer)
    return {name: size for name, size in parts.items() if size}


def optimizer_bytes(modules: Sequence[nn.Module], config: OptimizerConfig) -> int:
    """Both moments of what the modules train, with the step or the scales of each tensor."""
    moments = _float32_moments if config.kind == "adamw" else _moments_of_8_bits
    return sum(moments(tensor) for module in modules for tensor in trainable_parameters(module).values())


def make_roles(models: Mapping[str, Model]) -> tuple[Role, ...]:
    """Who holds what of the weights."""
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
