"""Plans balanced batches of sequences under a token budget, for one process or for a rank. Works on lengths only."""

from collections.abc import Sequence

from proximo.distributed.world import current


def plan_batches(lengths: Sequence[int], *, token_budget: int) -> list[list[int]]:
    """Indices of `lengths` in as few balanced batches as the budget suggests, each in ascending order.

    The longest sequences are placed first, each into the batch with the fewest tokens. If a batch of several sequences
    exceeds the budget, the plan is repeated with one more batch. Only a single sequence may exceed the budget.
    """
    if not lengths:
        return []
    num_batches = -(-sum(lengths) // token_budget)
    while True:
        batches = _fill(lengths, num_batches)
        fits = all(len(batch) == 1 or sum(lengths[i] for i in batch) <= token_budget for batch in batches)
        if fits or num_batches >= len(lengths):
            return [sorted(batch) for batch in batches if batch]
        num_batches += 1


def plan_shares(lengths: Sequence[int], *, token_budget: int, num_ranks: int) -> list[list[list[int]]]:
    """The batches of every rank: as many for each, since ranks meet in every pass.

    Together they hold every index once, in balanced batches within the budget. An empty batch is a pass over nothing.
    """
    if num_ranks == 1:
        return [plan_batches(lengths, token_budget=token_budget)]
    rounds = -(-sum(lengths) // (token_budget * num_ranks))
    while True:
        batches = [sorted(batch) for batch in _fill(lengths, rounds * num_ranks)]
        fits = all(len(batch) <= 1 or sum(lengths[i] for i in batch) <= token_budget for batch in batches)
        if fits or rounds * num_ranks >= len(lengths):
            return [batches[rank::num_ranks] for rank in range(num_ranks)]
        rounds += 1


def plan_own_share(lengths: Sequence[int], *, token_budget: int) -> list[list[int]]:
    """The batches of this process's rank, as `plan_shares` plans them."""
    world = current()
    return plan_shares(lengths, token_budget=token_budget, num_ranks=world.size)[world.rank]


def _fill(lengths: Sequence[int], num_batches: int) -> list[list[int]]:
    batches: list[list[int]] = [[] for _ in range(num_batches)]
    loads = [0] * num_batches
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        emptiest = loads.index(min(loads))
        batches[emptiest].append(index)
        loads[emptiest] += lengths[index]
    return batches
