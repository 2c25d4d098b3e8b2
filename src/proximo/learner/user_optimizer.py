"""An optimizer and a schedule from a library user. The AdamW of recipes is in optimizer.py."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, SupportsFloat

from torch import nn
from torch.optim import Optimizer

from proximo.distributed.world import current
from proximo.errors import ConfigError, TrainingError, memory_ran_out
from proximo.user_code import error_text, where_raised
from proximo_verifiers.callables import calling_problem


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
        return current().once(lambda: self._factor(update, num_updates), what="the schedule of an optimizer")

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
