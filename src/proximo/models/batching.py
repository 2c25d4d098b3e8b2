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


def plan_share(lengths: Sequence[int], *, token_budget: int, rank: int, num_ranks: int) -> list[list[int]]:
    """The batches of one rank: as many on each rank, since ranks meet in every pass. An empty batch is a pass over
    nothing, for a rank without a batch of its own.

    All ranks together have every index once, in balanced batches within the budget.
    """
    if num_ranks == 1:
        return plan_batches(lengths, token_budget=token_budget)
    if not lengths:
        return []
    rounds = max(1, -(-sum(lengths) // (token_budget * num_ranks)))
    while True:
        batches = _fill(lengths, rounds * num_ranks)
        fits = all(len(batch) <= 1 or sum(lengths[i] for i in batch) <= token_budget for batch in batches)
        if fits or rounds * num_ranks >= len(lengths):
            return [sorted(batch) for batch in batches[rank::num_ranks]]
        rounds += 1


def plan_own_share(lengths: Sequence[int], *, token_budget: int) -> list[list[int]]:
    """`plan_share` for the rank of this process."""
    world = current()
    return plan_share(lengths, token_budget=token_budget, rank=world.rank, num_ranks=world.size)


def _fill(lengths: Sequence[int], num_batches: int) -> list[list[int]]:
    batches: list[list[int]] = [[] for _ in range(num_batches)]
    loads = [0] * num_batches
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        emptiest = loads.index(min(loads))
        batches[emptiest].append(index)
        loads[emptiest] += lengths[index]
    return batches
