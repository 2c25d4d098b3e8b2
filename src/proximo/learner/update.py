"""One update: gradients are accumulated over micro-batches, guarded, clipped and applied. The loss is passed in."""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from proximo.distributed.world import World, checksum, current, local, whole
from proximo.errors import TrainingError
from proximo.learner.expert_balance import ExpertBalance
from proximo.learner.optimizers import OptimizerOptions, OwnOptimizer, trainable_parameters
from proximo.models.precision.compute import casting

if TYPE_CHECKING:  # FSDP and transformers take seconds to import, and not every learner needs them
    from proximo.distributed.sharding import Sharding

Batch = TypeVar("Batch")
Statistics = TypeVar("Statistics")


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateResult(Generic[Statistics]):
    """Statistics of one update."""

    loss: float
    """Sum of the micro-batches' losses: each is already divided by the count of the whole update."""
    statistics: tuple[Statistics, ...]
    """One entry per micro-batch of all ranks. They are sums, so the caller adds them up."""
    gradient_norm: float
    """L2 norm of the gradient before clipping."""
    learning_rate: float
    """The learning rate of the optimizer's first group."""
    refusal: str | None
    """Why the update was skipped; None where it was applied."""
    balancing_loss: float | None = None
    """The balancing loss of the experts before its coefficient, not part of `loss`; None without balancing."""


def _is_at_hand(value: Tensor) -> bool:
    """Whether reading a loss is free, as on a CPU. On an accelerator it would block, and then delay the next
    micro-batch, so losses are read after the last backward pass."""
    return value.device.type == "cpu"


def gradient_norm(parameters: dict[str, nn.Parameter]) -> Tensor:
    """Euclidean norm over all gradients, those of all shards, as a scalar on their device; 0 where there is none."""
    gradients = [parameter.grad for parameter in parameters.values() if parameter.grad is not None]
    return whole(torch.nn.utils.get_total_norm(gradients)) if gradients else torch.zeros(())


class Learner:
    """Owns the optimizer of one trained model, and counts its updates.

    `num_updates` is the length of the run's schedule. The model is in train mode during the gradient pass, since
    activation checkpointing of transformers is inactive in eval mode, and in eval mode at all other times but between
    updates that `training` encloses.

    On several ranks each gives its own micro-batches, as many as every other rank. Losses, statistics and gradients are
    then those of all ranks, so that every rank takes the same decision.
    """

    def __init__(
        self,
        module: nn.Module,
        options: OptimizerOptions | OwnOptimizer,
        *,
        num_updates: int,
        sharding: "Sharding | None" = None,
        balance: ExpertBalance | None = None,
    ) -> None:
        """`sharding`: that of the model; None for a model that is whole on each rank. `balance`: adds to every update
        the loss that balances the model's experts; micro-batches then say which tokens they read (`HasTokens`).

        Raises ConfigError if a user's optimizer does not hold the model's trainable parameters.
        """
        self.module = module
        self.sharding = sharding
        self.balance = balance
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
        """Train mode inside, eval mode afterwards. Around several updates it avoids switching modes for each."""
        if self._enclosed == 0:
            self.module.train()
        self._enclosed += 1
        try:
            yield
        finally:
            self._enclosed -= 1
            if self._enclosed == 0:
                self.module.eval()
                if self.sharding is not None:
                    self.sharding.release()

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
        if self.balance is None:
            return self._take(microbatches, loss, guard, seed)
        with self.training(), casting(frees=self.options.in_backward):
            balanced = self.balance.added_to(loss, microbatches, beginning=partial(_draw_from, seed))
            result = self._take(microbatches, balanced, lambda parts: guard([part.statistics for part in parts]), seed)
        return replace(
            cast("UpdateResult[Any]", result),
            loss=result.loss - sum(part.weighted.item() for part in result.statistics),
            statistics=tuple(part.statistics for part in result.statistics),
            balancing_loss=sum(part.balancing_loss.item() for part in result.statistics),
        )

    def _take(
        self,
        microbatches: Sequence[Batch],
        loss: Callable[[Batch], tuple[Tensor, Statistics]],
        guard: Callable[[Sequence[Statistics]], str | None],
        seed: int | None,
    ) -> UpdateResult[Statistics]:
        self.optimizer.zero_grad(set_to_none=True)
        learning_rate = self._set_rates()
        if self.options.in_backward:
            total, statistics, norm, refusal = self._step_in_backward(microbatches[0], loss, guard, seed)
        else:
            total, statistics = self._accumulate(microbatches, loss, seed)
            self._add_up_gradients()
            norm = float(gradient_norm(self.parameters))
            refusal = self._non_finite(total, norm) or guard(statistics)
            if refusal is None:
                self._apply(norm)
        self.updates_done += refusal is None
        self.optimizer.zero_grad(set_to_none=True)
        return UpdateResult(
            loss=total, statistics=tuple(statistics), gradient_norm=norm, learning_rate=learning_rate, refusal=refusal
        )

    def digest(self) -> dict[str, str]:
        """Name of a part -> value that must be equal on all ranks. Sharded tensors, which differ, are left out."""
        parts = {"updates": str(self.updates_done)}
        if self.sharding is None:
            states = (self.optimizer.state.get(parameter, {}) for parameter in self.parameters.values())
            moments = [each for state in states for each in state.values()]
            parts["weights"] = f"{checksum(list(self.parameters.values())):016x}"
            parts["moments"] = f"{checksum([each for each in moments if isinstance(each, Tensor)]):016x}"
        return parts

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
        losses, statistics, world = [], [], current()
        with self.training(), casting():
            for index, microbatch in enumerate(microbatches):
                _draw_from(seed, index)
                if self.sharding is not None:
                    self.sharding.begin_microbatch(is_last=index == len(microbatches) - 1)
                value, part = self._pass(loss, microbatch)
                statistics.append(part)
                losses.append(value.detach())
                # On several ranks, the others are in the backward pass already and wait for this rank.
                if world.size == 1 and _is_at_hand(value) and not math.isfinite(value.item()):
                    break
                value.backward()
        mine = torch.stack(losses).tolist() if losses else []
        return _of_all_ranks(mine, statistics, world)

    def _pass(self, loss: Callable[[Batch], tuple[Tensor, Statistics]], microbatch: Batch) -> tuple[Tensor, Statistics]:
        return loss(microbatch) if self.sharding is None else self.sharding.run(lambda: loss(microbatch))

    def _add_up_gradients(self) -> None:
        """Sum the gradients of a model that is whole on each rank. FSDP has summed those of a sharded model."""
        world = current()
        if world.size == 1 or self.sharding is not None:
            return
        with_gradient = set[str]().union(
            *world.gather(
                {name for name, parameter in self.parameters.items() if parameter.grad is not None},
                what="which parameters have a gradient",
            )
        )
        for name in with_gradient:
            if self.parameters[name].grad is None:
                self.parameters[name].grad = torch.zeros_like(self.parameters[name])
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        world.add_up(gradients, what="the sum of gradients")

    def _step_in_backward(
        self,
        microbatch: Batch,
        loss: Callable[[Batch], tuple[Tensor, Statistics]],
        guard: Callable[[Sequence[Statistics]], str | None],
        seed: int | None,
    ) -> tuple[float, list[Statistics], float, str | None]:
        """Loss, statistics, gradient norm and reason to skip. All checks run before the backward pass, which steps."""
        world = current()
        with self.training(), casting(frees=True):
            _draw_from(seed, 0)
            if self.sharding is not None:
                self.sharding.begin_microbatch(is_last=True)
            value, part = self._pass(loss, microbatch)
            total, statistics = _of_all_ranks([value.item()], [part], world)
            refusal = self._non_finite(total, 0.0) or guard(statistics)
            norms: list[Tensor] = []
            if refusal is None:
                whole_gradients = world if self.sharding is None else World()
                with stepping_in_backward(self.optimizer, self.parameters, whole_gradients) as norms:
                    value.backward()
        norm = float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0
        if self.sharding is not None:
            norm = math.sqrt(sum(world.gather(norm**2, what="the gradient norm")) / self.sharding.num_copies)
        self._non_finite(total, norm)
        return total, statistics, norm, refusal

    def _apply(self, norm: float) -> None:
        limit = self.options.max_gradient_norm
        if limit is not None and norm > limit:
            gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
            torch._foreach_mul_(gradients, limit / norm)
        self.optimizer.step()

    def _non_finite(self, loss: float, norm: float) -> str | None:
        """Why the update is skipped, or None. Raises TrainingError if non-finite gradients stop the run."""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if math.isfinite(norm):
            return None
        if self.options.non_finite_gradient == "skip" and not self.options.in_backward:
            return f"the gradient norm is {norm}"
        changed = ", and the weights have moved: resume from the last checkpoint" if self.options.in_backward else ""
        raise TrainingError(
            f"update {self.updates_done + 1}: the gradient norm is {norm}{changed}. non_finite_gradient: stop ends "
            "the run here; a lower learning rate may avoid it"
        )


def _draw_from(seed: int | None, index: int) -> None:
    """Seed torch for micro-batch number `index` of this rank; None where nothing is drawn."""
    if seed is not None:
        world = current()
        torch.manual_seed(seed + index * world.size + world.rank)


def _of_all_ranks(
    losses: Sequence[float], statistics: Sequence[Statistics], world: World
) -> tuple[float, list[Statistics]]:
    """The sum of the losses and all statistics, in the order of ranks."""
    shares = world.gather((list(losses), list(statistics)), what="losses and statistics of an update")
    return sum(loss for share, _ in shares for loss in share), [part for _, share in shares for part in share]


@contextmanager
def stepping_in_backward(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], world: World
) -> Generator[list[Tensor]]:
    """Inside, a backward pass steps every parameter that it reaches and frees its gradient.

    Yields a list that fills with the norm of each gradient, or of this rank's shard of it. `world`: the ranks whose
    gradients are to be summed first. A parameter is stepped once, after its whole gradient was added up. Autograd's
    version counters raise an error if anything reads a stepped weight again.
    The optimizer looks through all of its parameters at each step and finds one gradient.
    """
    norms: list[Tensor] = []

    def step(parameter: Tensor) -> None:
        assert parameter.grad is not None, "the hook runs after the gradient was added"
        world.add_up([parameter.grad], what="the sum of a gradient in the backward pass")
        norms.append(torch.linalg.vector_norm(local(parameter.grad)))
        optimizer.step()
        parameter.grad = None

    handles = [parameter.register_post_accumulate_grad_hook(step) for parameter in parameters.values()]
    try:
        yield norms
    finally:
        for handle in handles:
            handle.remove()
