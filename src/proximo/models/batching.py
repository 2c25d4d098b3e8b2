"""Plans balanced batches of sequences under a token budget, for one process or for a rank.

A batch computes shared prefixes once (packing.py), so sequences that share a prefix stay together if the budget allows
it. A unit is the indices of such sequences, or of one that shares nothing. Loads and budgets count computed tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from proximo.distributed.world import current


def plan_batches(
    lengths: Sequence[int], *, token_budget: int, prefixes: Sequence[Sequence[int]] = ()
) -> list[list[int]]:
    """Indices of `lengths` in as few balanced batches as the budget suggests, each in ascending order.

    The longest sequences are placed first, each into the batch with the fewest tokens. If a batch of several sequences
    exceeds the budget, the plan is repeated with one more batch. Only a single sequence may exceed the budget.

    `prefixes`: the first tokens of each sequence, which it shares with those that have the same ones; empty for none.
    """
    if not lengths:
        return []
    planner = _Planner(lengths, prefixes, token_budget)
    return [batch for batch in planner.batches(planner.units()) if batch]


def plan_shares(
    lengths: Sequence[int], *, token_budget: int, num_ranks: int, prefixes: Sequence[Sequence[int]] = ()
) -> list[list[list[int]]]:
    """The batches of every rank: equally many for each, since ranks meet in every pass.

    Together they hold every index once, in balanced batches within the budget. An empty batch is a pass over nothing.
    Sequences that share a prefix are spread over ranks only if this takes tokens from the fullest batch.
    """
    if num_ranks == 1:
        return [plan_batches(lengths, token_budget=token_budget, prefixes=prefixes)]
    planner = _Planner(lengths, prefixes, token_budget)
    batches = planner.batches(planner.spread(planner.units(), num_ranks), batches_per_round=num_ranks)
    return [batches[rank::num_ranks] for rank in range(num_ranks)]


def plan_own_share(
    lengths: Sequence[int], *, token_budget: int, prefixes: Sequence[Sequence[int]] = ()
) -> list[list[int]]:
    """The batches of this process's rank, as `plan_shares` plans them."""
    world = current()
    shares = plan_shares(lengths, token_budget=token_budget, num_ranks=world.size, prefixes=prefixes)
    return shares[world.rank]


Unit = Sequence[int]


@dataclass(frozen=True, slots=True)
class _Planner:
    lengths: Sequence[int]
    prefixes: Sequence[Sequence[int]]
    token_budget: int

    def cost(self, unit: Unit) -> int:
        """Tokens that are computed for a unit: a shared prefix counts once."""
        shared = len(self._prefix(unit[0]))
        return sum(self.lengths[i] for i in unit) - shared * (len(unit) - 1)

    def _prefix(self, index: int) -> Sequence[int]:
        return self.prefixes[index] if self.prefixes else ()

    def units(self) -> list[Unit]:
        """Sequences that share a prefix, cut into as few units as fit into the budget; each other sequence alone."""
        together: dict[object, list[int]] = {}
        for index in range(len(self.lengths)):
            prefix = tuple(self._prefix(index))
            together.setdefault(prefix or index, []).append(index)
        return [unit for members in together.values() for unit in self._within_budget(members)]

    def _within_budget(self, members: Unit) -> list[Unit]:
        shared = len(self._prefix(members[0]))
        least = max(1, -(-(self.cost(members) - shared) // max(1, self.token_budget - shared)))
        for count in range(least, len(members)):
            units = self._parts(members, count)
            if all(len(unit) == 1 or self.cost(unit) <= self.token_budget for unit in units):
                return units
        return [[index] for index in members]

    def _parts(self, members: Unit, count: int) -> list[Unit]:
        parts = _fill([self.lengths[i] for i in members], count)
        return [sorted(members[i] for i in part) for part in parts if part]

    def spread(self, units: list[Unit], num_ranks: int) -> list[Unit]:
        """Cut units in two as long as the fullest of `num_ranks` batches then has fewer tokens."""
        while True:
            costs = [self.cost(unit) for unit in units]
            batches = _fill(costs, num_ranks)
            loads = [sum(costs[i] for i in batch) for batch in batches]
            fullest = batches[loads.index(max(loads))]
            largest = max((i for i in fullest if len(units[i]) > 1), key=lambda i: costs[i], default=None)
            if largest is None:
                return units
            cut = [*units[:largest], *self._parts(units[largest], 2), *units[largest + 1 :]]
            if self._fullest(cut, num_ranks) >= max(loads):
                return units
            units = cut

    def _fullest(self, units: Sequence[Unit], num_batches: int) -> int:
        costs = [self.cost(unit) for unit in units]
        return max(sum(costs[i] for i in batch) for batch in _fill(costs, num_batches))

    def batches(self, units: Sequence[Unit], *, batches_per_round: int = 1) -> list[list[int]]:
        """The units in batches within the budget, a multiple of `batches_per_round` of them."""
        costs = [self.cost(unit) for unit in units]
        rounds = -(-sum(costs) // (self.token_budget * batches_per_round))
        while True:
            batches = _fill(costs, rounds * batches_per_round)
            fits = all(len(batch) <= 1 or sum(costs[i] for i in batch) <= self.token_budget for batch in batches)
            if fits or rounds * batches_per_round >= len(units):
                return [sorted(index for i in batch for index in units[i]) for batch in batches]
            rounds += 1


def _fill(lengths: Sequence[int], num_batches: int) -> list[list[int]]:
    batches: list[list[int]] = [[] for _ in range(num_batches)]
    loads = [0] * num_batches
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        emptiest = loads.index(min(loads))
        batches[emptiest].append(index)
        loads[emptiest] += lengths[index]
    return batches
