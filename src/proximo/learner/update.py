"""One update: gradients accumulated over micro-batches, guarded, clipped, applied. Knows no loss: it is passed in."""

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from proximo.errors import TrainingError
from proximo.learner.optimizer import OptimizerOptions, gradient_norm, trainable_parameters
from proximo.learner.own_optimizer import OwnOptimizer
from proximo.models.precision.compute import casting

Batch = TypeVar("Batch")
Statistics = TypeVar("Statistics")


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateResult(Generic[Statistics]):
    """Statistics of one update."""

    loss: float
    """Sum of the micro-batches' losses: each is already divided by the count of the whole update."""
    statistics: tuple[Statistics, ...]
    """One entry per micro-batch; they are sums, so the caller adds them up."""
    gradient_norm: float
    """L2 norm of the gradient before clipping."""
    learning_rate: float
    """Of the optimizer's first group."""
    refusal: str | None
    """Why the update was skipped; None where it was applied."""


def _is_at_hand(value: Tensor) -> bool:
    """Of an accelerator a number would be waited for, and the accelerator then for the next micro-batch: there numbers
    are asked for after the last backward pass."""
    return value.device.type == "cpu"


class Learner:
    """Owns the optimizer of one trained model, and counts its updates.

    `num_updates` is the length of the run's schedule. The model is in train mode during the gradient pass, since
    activation checkpointing of transformers is inactive in eval mode, and in eval mode at all other times but between
    updates that `training` encloses.
    """

    def __init__(self, module: nn.Module, options: OptimizerOptions | OwnOptimizer, *, num_updates: int) -> None:
        """Raises ConfigError where an optimizer that was brought does not hold the model's trainable parameters."""
        self.module = module
        self.options = options
        self.num_updates = num_updates
        self.parameters = trainable_parameters(module)
        self.optimizer = options.build(self.parameters)
        self.peak_rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.updates_done = 0
        self._enclosed = 0
        module.eval()

    @contextmanager
    def training(self) -> Generator[None]:
        """Train mode inside, eval mode afterwards: around several updates, it spares each a walk over all modules."""
        if self._enclosed == 0:
            self.module.train()
        self._enclosed += 1
        try:
            yield
        finally:
            self._enclosed -= 1
            if self._enclosed == 0:
                self.module.eval()

    def update(
        self,
        microbatches: Sequence[Batch],
        loss: Callable[[Batch], tuple[Tensor, Statistics]],
        *,
        guard: Callable[[Sequence[Statistics]], str | None] = lambda _: None,
        seed: int | None = None,
    ) -> UpdateResult[Statistics]:
        """Accumulate the gradients of all micro-batches and take one optimizer step.

        `loss` returns a scalar whose sum over the micro-batches is the loss of the update, and detached sums.
        `guard` sees all of them and may return a reason to skip. A skipped update leaves optimizer, momentum and
        the count of updates untouched. `seed` seeds torch before each micro-batch, where dropout is in use.

        Raises TrainingError where several micro-batches are given and weights step in the backward pass, before
        anything is done; and where a gradient is not finite and such an update is not to be skipped.
        """
        if self.options.in_backward and len(microbatches) != 1:
            raise TrainingError(
                f"an update was cut into {len(microbatches)} micro-batches, but with in_backward each weight steps in "
                "the backward pass of the first: raise tokens_per_microbatch until an update is one micro-batch, or "
                "set in_backward: false"
            )
        self.optimizer.zero_grad(set_to_none=True)
        learning_rate = self._set_rates()
        if self.options.in_backward:
            total, statistics, norm, refusal = self._step_in_backward(microbatches[0], loss, guard, seed)
        else:
            total, statistics = self._accumulate(microbatches, loss, seed)
            norm = float(gradient_norm(self.parameters))
            refusal = self._non_finite(total, norm) or guard(statistics)
            if refusal is None:
                self._apply(norm)
        self.updates_done += refusal is None
        self.optimizer.zero_grad(set_to_none=True)
        return UpdateResult(
            loss=total, statistics=tuple(statistics), gradient_norm=norm, learning_rate=learning_rate, refusal=refusal
        )

    def _set_rates(self) -> float:
        """Put this update's learning rates in place; returns the first."""
        factor = self.options.rate_factor(update=self.updates_done, num_updates=self.num_updates)
        rates = [peak * factor for peak in self.peak_rates]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        return rates[0]

    def _accumulate(
        self,
        microbatches: Sequence[Batch],
        loss: Callable[[Batch], tuple[Tensor, Statistics]],
        seed: int | None,
    ) -> tuple[float, list[Statistics]]:
        losses, statistics = [], []
        with self.training(), casting():
            for index, microbatch in enumerate(microbatches):
                if seed is not None:
                    torch.manual_seed(seed + index)
                value, part = loss(microbatch)
                statistics.append(part)
                losses.append(value.detach())
                if _is_at_hand(value) and not math.isfinite(value.item()):
                    break
                value.backward()
        return sum(torch.stack(losses).tolist()) if losses else 0.0, statistics

    def _step_in_backward(
        self,
        microbatch: Batch,
        loss: Callable[[Batch], tuple[Tensor, Statistics]],
        guard: Callable[[Sequence[Statistics]], str | None],
        seed: int | None,
    ) -> tuple[float, list[Statistics], float, str | None]:
        """Loss, statistics, gradient norm and refusal; what can refuse the update is asked before the backward pass."""
        with self.training(), casting():
            if seed is not None:
                torch.manual_seed(seed)
            value, part = loss(microbatch)
            total = value.item()
            refusal = self._non_finite(total, 0.0) or guard([part])
            norms: list[Tensor] = []
            if refusal is None:
                with stepping_in_backward(self.optimizer, self.parameters.values()) as norms:
                    value.backward()
        norm = float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0
        self._non_finite(total, norm)
        return total, [part], norm, refusal

    def _apply(self, norm: float) -> None:
        limit = self.options.max_gradient_norm
        if limit is not None and norm > limit:
            gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
            torch._foreach_mul_(gradients, limit / norm)
        self.optimizer.step()

    def _non_finite(self, loss: float, norm: float) -> str | None:
        """Why the update is skipped, if it is. Raises TrainingError where a gradient is to stop the run instead."""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if math.isfinite(norm):
            return None
        if self.options.non_finite_gradient == "skip" and not self.options.in_backward:
            return f"the gradient norm is {norm}"
        changed = ", and the weights have moved: go on from the last checkpoint" if self.options.in_backward else ""
        raise TrainingError(
            f"update {self.updates_done + 1}: the gradient norm is {norm}{changed}. non_finite_gradient: stop ends "
            "the run here; a lower learning rate may avoid it"
        )


@contextmanager
def stepping_in_backward(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> Generator[list[Tensor]]:
    """Inside, a backward pass steps every parameter that it reaches, and frees its gradient.

    Yields a list that fills with the norm of each gradient. A parameter is stepped once, when all that it did in the
    forward pass has been accounted for; that nothing reads it afterwards is checked by autograd's version counters.
    The optimizer looks through all of its parameters at each step and finds one gradient.
    """
    norms: list[Tensor] = []

    def step(parameter: Tensor) -> None:
        assert parameter.grad is not None, "the hook runs after the gradient was added"
        norms.append(torch.linalg.vector_norm(parameter.grad))
        optimizer.step()
        parameter.grad = None

    handles = [parameter.register_post_accumulate_grad_hook(step) for parameter in parameters]
    try:
        yield norms
    finally:
        for handle in handles:
            handle.remove()
