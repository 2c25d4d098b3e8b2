"""What a rank exchanges with the others in a step, and how long the step takes. Formulas: docs/scale.md.

Every rank is taken to have as much work as the one with the most: imbalance is not counted.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from proximo.plan.cost_model import Passes, StepCost
from proximo.plan.machine import Machine
from proximo.plan.rank_layout import Layout, PlacedModel
from proximo.plan.rank_memory import host_bytes
from proximo.plan.record import RankCosts
from proximo.plan.static_memory import OptimizedModules

GATHER = "all-gather"
SCATTER = "reduce-scatter"
ADD_UP = "all-reduce"
RECORDS = "records"
HOST = "to and from the host"
RECORD_BYTES = 50
"""Of what a step knows about a token, which every rank gets: ids, log-probs, values, rewards."""
_HOST_STEP_BYTES = 28
"""AdamW reads 16 bytes of a number and writes 12."""

Collective = Literal["all-gather", "reduce-scatter", "all-reduce"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """Collectives of one kind that a rank takes part in, in one step."""

    kind: Collective
    count: int
    size: int
    """Bytes of the whole tensors, which `count` collectives bring together or add up."""
    ranks: int
    """Of the group."""

    @property
    def received(self) -> int:
        """Bytes that come to this rank."""
        share = self.size * (self.ranks - 1) // self.ranks
        return 2 * share if self.kind == ADD_UP else share


def exchanges(layout: Layout, passes: Passes, *, num_copies: int | None = None) -> list[Exchange]:
    """The collectives of models and gradients in these passes."""
    ranks, found = layout.ranks, list[Exchange]()
    copies = num_copies or ranks.num // ranks.shard_size
    for model in (layout.models[role] for role in layout.used_by(passes.modules)):
        if not model.is_sharded:
            if passes.kind == "train" and model.gradients and ranks.num > 1:
                count, size = passes.calls * len(model.buckets), passes.calls * model.gradients
                found.append(Exchange(kind=ADD_UP, count=count, size=size, ranks=ranks.num))
            continue
        found.append(_gathers(model, passes, ranks.shard_size))
        reductions = passes.calls * (passes.microbatches if ranks.devices.reduce_gradients == "microbatch" else 1)
        units = [unit for unit in (*model.layers, model.root) if unit.gradients]
        if passes.kind == "train" and units:
            count, size = reductions * sum(unit.reductions for unit in units), reductions * model.gradients
            found.append(Exchange(kind=SCATTER, count=count, size=size, ranks=ranks.shard_size))
            if copies > 1:
                found.append(Exchange(kind=ADD_UP, count=count, size=size // ranks.shard_size, ranks=copies))
    return found


def _gathers(model: PlacedModel, passes: Passes, shard_size: int) -> Exchange:
    every, root = [*model.layers], [model.root]
    match passes.kind, model.shard:
        case "train", "full":
            units = passes.microbatches * (every + every[model.first_backward_layer :] + root)
        case "read", "full":
            units = passes.microbatches * every + root
        case _:
            units = every + root
    count, size = sum(unit.gathers for unit in units), sum(unit.whole for unit in units)
    return Exchange(kind=GATHER, count=passes.calls * count, size=passes.calls * size, ranks=shard_size)


def rank_costs(
    layout: Layout, optimized: OptimizedModules, costs: Mapping[str, StepCost], machine: Machine, *, is_half: bool
) -> RankCosts:
    """Traffic and time of each phase, for a rank."""
    traffic, collectives, seconds = {}, {}, {}
    clock = _Clock(layout=layout, machine=machine, is_half=is_half)
    for name, cost in costs.items():
        found = [each for passes in cost.passes for each in exchanges(layout, passes)]
        count, received = Counter[str](), Counter[str]()
        for each in found:
            count[each.kind] += each.count
            received[each.kind] += each.received
        received[RECORDS] = sum(
            RECORD_BYTES * (layout.ranks.num - 1) * cost.tokens for p in cost.passes if p.kind == "rollout"
        )
        received[HOST] = sum(_host_traffic(layout, passes) for passes in cost.passes)
        traffic[name] = {kind: size for kind, size in received.items() if size}
        collectives[name] = dict(count)
        seconds[name] = clock.seconds(cost, found, traffic[name])
    return RankCosts(
        num=layout.ranks.num,
        host=host_bytes(layout, optimized),
        traffic=traffic,
        collectives=collectives,
        seconds=seconds,
    )


def _host_traffic(layout: Layout, passes: Passes) -> int:
    """Bytes between a device and its host: shards on their way to a gather and gradients back, or idle models."""
    total = 0
    for model in (layout.models[role] for role in layout.used_by(passes.modules)):
        if model.offload == "always" and model.whole:
            gathers = _gathers(model, passes, layout.ranks.shard_size)
            total += gathers.size * model.shards // model.whole
            if passes.kind == "train":
                total += passes.calls * model.gradients // layout.ranks.shard_size
        elif model.offload == "idle" and not model.trains:
            total += 2 * model.weights
    return total


@dataclass(frozen=True, kw_only=True, slots=True)
class _Clock:
    """Times of phases on a machine."""

    layout: Layout
    machine: Machine
    is_half: bool

    def seconds(self, cost: StepCost, found: Sequence[Exchange], traffic: Mapping[str, int]) -> float:
        """Gathers of layers run beside the computation; sums, copies and the gather of a rollout do not."""
        ranks, machine = self.layout.ranks, self.machine
        everywhere = machine.inside if ranks.num <= machine.devices else machine.between
        in_group = machine.inside if ranks.shard_size <= machine.devices else machine.between
        gathers = sum(each.received for each in found if each.kind == GATHER) / in_group
        sums = sum(each.received / (in_group if each.kind == SCATTER else everywhere) for each in found)
        sums -= sum(each.received / everywhere for each in found if each.kind == GATHER)
        copies = traffic.get(HOST, 0) / machine.host + traffic.get(RECORDS, 0) / everywhere
        work = cost.flops / machine.flops
        decoding = sum(self._decoding(passes) for passes in cost.passes)
        if decoding:
            return max(work, decoding) + gathers + copies
        return max(work, gathers) + sums + copies + sum(self._host_steps(passes) for passes in cost.passes)

    def _decoding(self, passes: Passes) -> float:
        """Each step of a rollout reads all weights."""
        if passes.kind != "rollout":
            return 0.0
        used = [self.layout.models[role] for role in self.layout.used_by(passes.modules)]
        read = sum(m.whole if m.is_sharded else m.weights // (2 if self.is_half else 1) for m in used)
        return passes.microbatches * read / self.machine.memory

    def _host_steps(self, passes: Passes) -> float:
        """AdamW on the host."""
        used = [self.layout.models[role] for role in self.layout.used_by(passes.modules)]
        numbers = sum(m.gradients // 4 // self.layout.ranks.shard_size for m in used if m.offload == "always")
        return passes.calls * numbers * _HOST_STEP_BYTES / self.machine.host if passes.kind == "train" else 0.0
