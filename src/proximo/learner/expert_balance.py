"""Adds the load-balancing loss of a mixture of experts to the losses of an update."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import add
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor

from proximo.algorithms.losses import ExpertLoad, balancing_loss
from proximo.distributed.world import current
from proximo.models.packing import Packed

if TYPE_CHECKING:  # transformers takes seconds to import, and a learner of other losses does not need it
    from proximo.models.backbone import Backbone

Batch = TypeVar("Batch")
Statistics = TypeVar("Statistics")


class HasTokens(Protocol):
    """A micro-batch that knows which tokens its loss reads."""

    @property
    def tokens(self) -> Packed: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Balanced(Generic[Statistics]):
    """The result of a micro-batch: the statistics of its own loss, and its share of the balancing loss."""

    statistics: Statistics
    balancing_loss: Tensor
    """A detached scalar, before the coefficient."""
    weighted: Tensor
    """`loss` times the coefficient, as added to the micro-batch's loss."""


class ExpertBalance:
    """The balancing loss of one trained model.

    The shares of the experts are those of the whole update. If each rank has one micro-batch, its pass gives them.
    Otherwise a pass without gradients over all micro-batches comes first.
    """

    def __init__(self, backbone: "Backbone") -> None:
        self._backbone = backbone

    @classmethod
    def of(cls, backbone: "Backbone") -> "ExpertBalance | None":
        """The balancing loss of a model; None for a model that is not balanced."""
        return None if backbone.balancing is None else cls(backbone)

    def added_to(
        self,
        loss: Callable[[Batch], tuple[Tensor, Statistics]],
        microbatches: Sequence[Batch],
        *,
        beginning: Callable[[int], None],
    ) -> Callable[[Batch], tuple[Tensor, Balanced[Statistics]]]:
        """The loss of a micro-batch with its share of the balancing loss.

        `microbatches`: those of the update, equally many on every rank; each is a `HasTokens`. `beginning`: called with
        the index of each micro-batch before the pass that counts it, to seed random numbers.
        """
        options = self._backbone.balancing
        assert options is not None, "`of` makes none for such a model"
        given = cast("Sequence[HasTokens]", microbatches)
        known = self._of_update(given, beginning) if len(given) > 1 else None

        def balanced(batch: Batch) -> tuple[Tensor, Balanced[Statistics]]:
            with self._backbone.noting_loads() as loads:
                value, statistics = loss(batch)
            own = reduce(add, loads)
            counts, num_decisions = _of_all_ranks(own) if known is None else known
            share = balancing_loss(own.probabilities, counts, num_decisions=num_decisions)
            weighted = options.coefficient * share
            parts = Balanced(statistics=statistics, balancing_loss=share.detach(), weighted=weighted.detach())
            return value + weighted.to(value.dtype), parts

        return balanced

    @torch.no_grad()
    def _of_update(self, microbatches: Sequence[HasTokens], beginning: Callable[[int], None]) -> tuple[Tensor, Tensor]:
        loads = []
        for index, batch in enumerate(microbatches):
            beginning(index)
            loads.append(self._backbone.run_pass(partial(self._load, batch.tokens)))
        return _of_all_ranks(reduce(add, (ExpertLoad(counts=c, probabilities=p, num_decisions=n) for c, p, n in loads)))

    def _load(self, packed: Packed) -> tuple[Tensor, Tensor, Tensor]:
        load = self._backbone.expert_load(packed)
        return load.counts, load.probabilities, load.num_decisions


def _of_all_ranks(load: ExpertLoad) -> tuple[Tensor, Tensor]:
    """Counts [E] and number of decisions over all ranks."""
    totals = torch.cat([load.counts, load.num_decisions[None]])
    current().add_up([totals], what="how often each expert was chosen")
    return totals[:-1], totals[-1]
