"""One update: gradients accumulated over micro-batches, guarded, clipped, applied. Knows no loss: it is passed in."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from proximo.learner.optimizer import (
    OptimizerOptions,
    gradient_norm,
    make_optimizer,
    scheduled_learning_rate,
    trainable_parameters,
)

Batch = TypeVar("Batch")
Statistics = TypeVar("Statistics")


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateResult(Generic[Statistics]):
    """What one update did."""

    loss: float
    """Sum of the micro-batches' losses: each is already divided by the count of the whole update."""
    statistics: tuple[Statistics, ...]
    """One entry per micro-batch; they are sums, so the caller adds them up."""
    gradient_norm: float
    """Before clipping."""
    learning_rate: float
    refusal: str | None
    """Why the update was skipped; None where it was applied."""


class Learner:
    """Owns the optimizer of one trained model, and counts its updates.

    `num_updates` is the length of the run's schedule. The model is in train mode during the gradient pass, since
    activation checkpointing of transformers is inactive in eval mode, and in eval mode at all other times.
    """

    def __init__(self, module: nn.Module, options: OptimizerOptions, *, num_updates: int) -> None:
        self.module = module
        self.options = options
        self.num_updates = num_updates
        self.parameters = trainable_parameters(module)
        self.optimizer = make_optimizer(self.parameters, options)
        self.updates_done = 0
        module.eval()

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
        """
        self.optimizer.zero_grad(set_to_none=True)
        learning_rate = scheduled_learning_rate(self.options, update=self.updates_done, num_updates=self.num_updates)
        total, statistics = self._accumulate(microbatches, loss, seed)
        norm = float(gradient_norm(self.parameters))
        refusal = _non_finite(total, norm) or guard(statistics)
        if refusal is None:
            self._apply(norm, learning_rate)
        self.optimizer.zero_grad(set_to_none=True)
        return UpdateResult(
            loss=total, statistics=tuple(statistics), gradient_norm=norm, learning_rate=learning_rate, refusal=refusal
        )

    def _accumulate(
        self,
        microbatches: Sequence[Batch],
        loss: Callable[[Batch], tuple[Tensor, Statistics]],
        seed: int | None,
    ) -> tuple[float, list[Statistics]]:
        total, statistics = 0.0, []
        self.module.train()
        for index, microbatch in enumerate(microbatches):
            if seed is not None:
                torch.manual_seed(seed + index)
            value, part = loss(microbatch)
            statistics.append(part)
            total += value.item()
            if not math.isfinite(total):
                break
            value.backward()
        self.module.eval()
        return total, statistics

    def _apply(self, norm: float, learning_rate: float) -> None:
        limit = self.options.max_gradient_norm
        if limit is not None and norm > limit:
            gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
            torch._foreach_mul_(gradients, limit / norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.updates_done += 1


def _non_finite(loss: float, norm: float) -> str | None:
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    if not math.isfinite(norm):
        return f"the gradient norm is {norm}"
    return None
