"""AdamW over the trainable parameters of a model, and the learning rate as a function of position."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from proximo.distributed.world import whole
from proximo.learner.low_memory_adamw import LowMemoryKind, make_low_memory

Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerOptions:
    """Plain values of an AdamW and its schedule."""

    learning_rate: float
    kind: Literal["adamw"] | LowMemoryKind = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    schedule: Schedule = "constant"
    warmup_updates: int = 0
    final_fraction: float = 0.0
    max_gradient_norm: float | None = 1.0
    non_finite_gradient: Literal["skip", "stop"] = "skip"
    in_backward: bool = False

    def build(self, parameters: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of a model's parameters."""
        return make_optimizer(parameters, self)

    def rate_factor(self, *, update: int, num_updates: int) -> float:
        """The factor of the peak learning rate at update number `update` (from 0)."""
        return learning_rate_factor(
            update,
            num_updates=num_updates,
            warmup_updates=self.warmup_updates,
            kind=self.schedule,
            floor=self.final_fraction,
        )


def learning_rate_factor(
    update: int, *, num_updates: int, warmup_updates: int = 0, kind: Schedule = "constant", floor: float = 0.0
) -> float:
    """The factor of the peak learning rate at one update (0 is the first).

    Warm-up rises in equal steps from 1 / (warmup_updates + 1) at the first update, so that no update has rate 0, to 1
    at update `warmup_updates`. From there `linear` and `cosine` fall to `floor` at update `num_updates`, one after the
    last, and remain there. `constant` stays at 1 and ignores `floor`.
    """
    if update < warmup_updates:
        return (update + 1) / (warmup_updates + 1)
    if kind == "constant":
        return 1.0
    if update >= num_updates:
        return floor
    progress = (update - warmup_updates) / (num_updates - warmup_updates)
    remaining = 1 - progress if kind == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return floor + (1 - floor) * remaining


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> parameter, in the model's order; the names key the optimizer's state in a checkpoint."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def make_optimizer(parameters: dict[str, nn.Parameter], options: OptimizerOptions) -> torch.optim.Optimizer:
    """AdamW (arXiv:1711.05101) in which matrices decay, and biases, norms and scalars do not."""
    groups = [
        {"params": [p for p in parameters.values() if p.ndim >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    arguments: dict[str, Any] = {"lr": options.learning_rate, "betas": options.betas, "eps": options.eps}
    if options.kind != "adamw":
        return make_low_memory(options.kind, groups, **arguments)
    fused = all(parameter.device.type in ("cpu", "cuda", "mps") for parameter in parameters.values())
    return torch.optim.AdamW(groups, fused=fused, **arguments)


def gradient_norm(parameters: dict[str, nn.Parameter]) -> Tensor:
    """Euclidean norm over all gradients, those of all shards, as a scalar on their device; 0 where there is none."""
    gradients = [parameter.grad for parameter in parameters.values() if parameter.grad is not None]
    return whole(torch.nn.utils.get_total_norm(gradients)) if gradients else torch.zeros(())
