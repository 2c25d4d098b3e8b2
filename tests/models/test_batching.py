"""Batches under a token budget: complete, balanced, and no more of them than needed. Integers only."""

import random

import pytest

from proximo.models.packing import plan_batches, plan_shares


def random_lengths(seed: int) -> tuple[list[int], int]:
    rng = random.Random(seed)
    return [rng.randint(1, 40) for _ in range(rng.randint(1, 30))], rng.randint(10, 120)


def test_every_sequence_is_in_exactly_one_batch_the_budget_holds_and_batches_are_balanced() -> None:
    """The longest first into the emptiest: two loads differ by no more than one sequence."""
    for seed in range(50):
        lengths, budget = random_lengths(seed)
        plan = plan_batches(lengths, token_budget=budget)
        assert sorted(index for batch in plan for index in batch) == list(range(len(lengths)))
        loads = [sum(lengths[i] for i in batch) for batch in plan]
        assert max(loads) - min(loads) <= max(lengths)
        for batch, load in zip(plan, loads, strict=True):
            assert batch
            assert batch == sorted(batch)
            assert len(batch) == 1 or load <= budget


@pytest.mark.parametrize(
    ("lengths", "budget", "expected"),
    [
        ([], 10, []),
        ([3, 3, 3], 100, [[0, 1, 2]]),
        ([3, 3, 3, 3], 6, [[0, 2], [1, 3]]),
        ([9, 1, 1, 1], 12, [[0, 1, 2, 3]]),
        ([5, 4, 3, 2, 1], 8, [[0, 3, 4], [1, 2]]),
        ([50, 2, 2], 10, [[0], [1], [2]]),
        ([6, 6, 6], 10, [[0], [1], [2]]),
        ([6, 6, 6], 9, [[0], [1], [2]]),  # 18 tokens ask for two batches, but no two of them fit together
        ([4, 100, 4, 2], 10, [[1], [0], [2], [3]]),
        ([6, 6, 6, 1, 1], 10, [[0, 3], [1, 4], [2]]),
        ([100, 4, 4, 2], 60, [[0], [1, 2, 3]]),
    ],
)
def test_small_plans_worked_by_hand(lengths: list[int], budget: int, expected: list[list[int]]) -> None:
    assert plan_batches(lengths, token_budget=budget) == expected


def random_groups(seed: int) -> tuple[list[int], list[tuple[int, ...]], int]:
    """Lengths, prefixes and a budget: groups of up to 8 sequences."""
    rng = random.Random(seed)
    lengths, prefixes = [], []
    for group in range(rng.randint(1, 6)):
        prefix = (group,) * rng.randint(0, 20)
        for _ in range(rng.randint(1, 8)):
            lengths.append(len(prefix) + rng.randint(1, 15))
            prefixes.append(prefix)
    order = rng.sample(range(len(lengths)), len(lengths))
    return [lengths[i] for i in order], [prefixes[i] for i in order], rng.randint(10, 120)


def computed(batch: list[int], lengths: list[int], prefixes: list[tuple[int, ...]]) -> int:
    return sum(lengths[i] - len(prefixes[i]) for i in batch) + sum(map(len, {prefixes[i] for i in batch}))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_what_is_computed_keeps_to_the_budget_and_cuts_a_group_only_for_it(num_ranks: int) -> None:
    for seed in range(50):
        lengths, prefixes, budget = random_groups(seed)
        shares = plan_shares(lengths, token_budget=budget, num_ranks=num_ranks, prefixes=prefixes)
        batches = [batch for share in shares for batch in share]
        assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
        assert len({len(share) for share in shares}) == 1
        for batch in batches:
            assert batch == sorted(batch)
            assert len(batch) <= 1 or computed(batch, lengths, prefixes) <= budget
        plan = plan_batches(lengths, token_budget=budget, prefixes=prefixes)
        for prefix in set(prefixes) - {()}:
            group = [i for i, other in enumerate(prefixes) if other == prefix]
            if computed(group, lengths, prefixes) <= budget:
                assert sum(prefix in {prefixes[i] for i in batch} for batch in plan) == 1


def test_a_group_counts_its_prefix_once() -> None:
    """Four sequences of 12 tokens, of which 10 are the same: 18 tokens; alone they would take four batches of 20."""
    group = {"lengths": [12] * 4, "prefixes": [(7,) * 10] * 4}
    assert plan_batches(**group, token_budget=18) == [[0, 1, 2, 3]]
    assert plan_batches(**group, token_budget=17) == [[0, 2], [1, 3]]
    assert plan_batches(**group, token_budget=11) == [[0], [1], [2], [3]]
    assert len(plan_batches(group["lengths"], token_budget=18)) == 4


def test_ranks_share_a_group_only_where_that_is_faster() -> None:
    """Two groups for two ranks stay whole. Of one, of 10 + 8 tokens, each takes half: 10 + 4."""
    two = plan_shares([12, 13] * 4, token_budget=99, num_ranks=2, prefixes=[(1,) * 10, (2,) * 11] * 4)
    assert two == [[[1, 3, 5, 7]], [[0, 2, 4, 6]]]
    one = plan_shares([12] * 4, token_budget=99, num_ranks=2, prefixes=[(1,) * 10] * 4)
    assert one == [[[0, 2]], [[1, 3]]]
    assert plan_shares([3, 9], token_budget=99, num_ranks=2, prefixes=[(1, 2), ()]) == [[[1]], [[0]]]
