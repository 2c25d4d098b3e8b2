"""Optimizers of trained models: AdamW from a recipe, also with moments of 8 bits (arXiv:2110.02861), or a user's own.

The learning rate is a function of position. bitsandbytes keeps the moments of tensors of fewer than 4,096 numbers in
float32; `adamw_paged_8bit` keeps all moments in memory that CUDA moves to the host when the device is full.
"""

import importlib
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, SupportsFloat

import torch
from torch import nn
from torch.optim import Optimizer

from proximo.distributed.world import current
from proximo.errors import ConfigError, MissingExtraError, TrainingError, memory_ran_out
from proximo.user_code import error_text, where_raised
from proximo_verifiers.callables import calling_problem

LowMemoryKind = Literal["adamw_8bit", "adamw_paged_8bit"]
Schedule = Literal["constant", "linear", "cosine"]


def check_low_memory(kind: str, device: torch.device) -> None:
    """Raises MissingExtraError or ConfigError where this machine cannot run the optimizer; loads nothing."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise MissingExtraError(
            f'optimizer kind {kind} needs bitsandbytes: pip install "proximo[low-memory]", or set kind: adamw'
        )
    if kind == "adamw_paged_8bit" and device.type != "cuda":
        raise ConfigError(
            f"optimizer kind {kind} pages its state between a CUDA device and the host, and this run is on "
            f"{device.type}: use adamw_8bit"
        )
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"optimizer kind {kind} runs on CUDA and on the CPU, not on {device.type}: use adamw")


def make_low_memory(kind: LowMemoryKind, groups: list[dict[str, Any]], **options: Any) -> Optimizer:
    """The optimizer; `options` are those of torch's AdamW. Raises as `check_low_memory`."""
    check_low_memory(kind, groups[0]["params"][0].device)
    optimizers: Any = importlib.import_module("bitsandbytes.optim")  # takes seconds
    make = optimizers.AdamW8bit if kind == "adamw_8bit" else optimizers.PagedAdamW8bit
    return make(groups, **options)


def page_state(optimizer: Optimizer) -> None:
    """Move moments that were read from a checkpoint into paged memory, if the optimizer uses it."""
    if not getattr(optimizer, "is_paged", False):
        return
    paged: Any = optimizer
    for parameter, state in optimizer.state.items():
        for name in ("state1", "state2"):
            buffer = paged.get_state_buffer(parameter, dtype=state[name].dtype)
            state[name] = buffer.copy_(state[name])


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


def constant(update: int, num_updates: int) -> float:
    """The schedule that keeps every learning rate at its initial value."""
    del update, num_updates
    return 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnOptimizer:
    """Any optimizer of torch's interface, for one trained model.

    It must hold every trainable parameter of the model once, in groups with one learning rate each. Set
    `requires_grad=False` on the others. Its state is saved and resumed if it consists of tensors and plain numbers.
    """

    in_backward: ClassVar[bool] = False

    make: Callable[[list[nn.Parameter]], Optimizer]
    """Makes the optimizer from the model's trainable parameters, in the model's order."""
    schedule: Callable[[int, int], float] = constant
    """(update from 0, updates of the run) -> factor of each group's learning rate."""
    max_gradient_norm: float | None = 1.0
    """Gradients are scaled down to this norm; None for no clipping."""
    non_finite_gradient: Literal["skip", "stop"] = "skip"
    """What an update with a non-finite gradient does: it is skipped, or stops the run."""

    def __post_init__(self) -> None:
        if not callable(self.make):
            raise ConfigError(
                "make must be a function from a list of parameters to their optimizer, got "
                f"{type(self.make).__name__}; for example make=lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
            )
        norm = self.max_gradient_norm
        if norm is not None and (isinstance(norm, bool) or not isinstance(norm, int | float) or not norm > 0):
            raise ConfigError(f"max_gradient_norm must be a number above 0, or None to clip nothing, got {norm!r:.60}")
        if self.non_finite_gradient not in ("skip", "stop"):
            raise ConfigError(f"non_finite_gradient must be 'skip' or 'stop', got {self.non_finite_gradient!r:.60}")
        for call, problem in (
            ("make(parameters)", calling_problem(self.make, [[]])),
            ("schedule(update, num_updates)", calling_problem(self.schedule, [0, 1], names=("update", "num_updates"))),
        ):
            if problem:
                raise ConfigError(f"your own optimizer is called as {call}, but {problem}")

    def rate_factor(self, *, update: int, num_updates: int) -> float:
        """The factor of each group's learning rate at update number `update` (from 0).

        On several ranks the schedule is called on rank 0. Raises TrainingError where it raises or gives no number.
        """
        return current().on_rank_0(lambda: self._factor(update, num_updates), what="the schedule of an optimizer")

    def _factor(self, update: int, num_updates: int) -> float:
        try:
            factor = self.schedule(update, num_updates)
        except Exception as error:
            location = where_raised(error, self.schedule)
            raise TrainingError(f"schedule({update}, {num_updates}) raised {error_text(error)} ({location})") from error
        if not isinstance(factor, SupportsFloat):
            raise TrainingError(
                f"schedule({update}, {num_updates}) must return the number that the learning rates are multiplied "
                f"with, it returned {factor!r:.60}"
            )
        return float(factor)

    def build(self, parameters: dict[str, nn.Parameter]) -> Optimizer:
        """Call `make`. Raises ConfigError where it raises, or gives no optimizer of exactly these parameters."""
        try:
            optimizer = self.make(list(parameters.values()))
        except Exception as error:
            if memory_ran_out(error):
                raise
            raise ConfigError(
                f"make(parameters) raised {error_text(error)} ({where_raised(error, self.make)})"
            ) from error
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(f"make must return a torch.optim.Optimizer, it returned {type(optimizer).__name__}")
        names = {id(parameter): name for name, parameter in parameters.items()}
        held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        missing = sorted(names[key] for key in names.keys() - set(held))
        if missing or len(held) != len(names):
            raise ConfigError(
                f"the optimizer holds {len(held)} tensors, the model trains {len(names)}"
                + (f", and {len(missing)} of those are missing, such as {missing[0]}" if missing else "")
                + ": give it all parameters that make is called with; what is not to train has requires_grad=False"
            )
        if any(not isinstance(group.get("lr"), float | int) for group in optimizer.param_groups):
            raise ConfigError("every group of the optimizer needs a number as its learning rate (lr)")
        return optimizer
