"""Which responses share an update: every one once per epoch, in an order that position alone decides."""

from itertools import groupby

import numpy as np
import pytest
import torch

from proximo.ppo.update.epochs import num_minibatches, plan_minibatches


def flat(epoch: list[list[int]]) -> list[int]:
    return [member for minibatch in epoch for member in minibatch]


@pytest.mark.parametrize(("num_members", "size"), [(1, 1), (3, 4), (8, 4), (10, 4), (7, 1)])
def test_every_member_is_seen_exactly_once_in_every_epoch(num_members: int, size: int) -> None:
    members = [10 * i + 3 for i in range(num_members)]
    plan = plan_minibatches(members, size=size, num_epochs=3, seed=1, step=2)
    assert len(plan) == 3
    for epoch in plan:
        assert sorted(flat(epoch)) == members
        assert len(epoch) == num_minibatches(num_members, size)
        assert all(len(minibatch) == size for minibatch in epoch[:-1])
        assert 1 <= len(epoch[-1]) <= size
    alone = plan_minibatches(members, size=num_members, num_epochs=1, seed=1, step=2)
    assert flat(alone[0]) == flat(plan[0]), "however many epochs follow and however it is cut"
    own_groups = list(map(str, members))
    assert plan_minibatches(members, size=size, num_epochs=3, seed=1, step=2, groups=own_groups) == plan
    assert [num_minibatches(n, 4) for n in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_each_epoch_step_and_seed_has_a_permutation_of_its_own() -> None:
    orders = [
        tuple(flat(epoch))
        for seed in (0, 1)
        for step in (0, 1)
        for epoch in plan_minibatches(range(32), size=8, num_epochs=3, seed=seed, step=step)
    ]
    assert len(set(orders)) == len(orders) == 12
    assert tuple(range(32)) not in orders


def test_the_plan_does_not_depend_on_what_was_drawn_before() -> None:
    first = plan_minibatches(range(16), size=5, num_epochs=2, seed=7, step=3)
    np.random.default_rng(0).random(5)
    torch.manual_seed(5)
    torch.rand(3)
    plan_minibatches(range(16), size=5, num_epochs=2, seed=7, step=2)
    assert plan_minibatches(range(16), size=5, num_epochs=2, seed=7, step=3) == first


def test_every_member_can_come_first() -> None:
    """A shuffle that left a part in place would favour some responses; 400 draws miss one of 8 once in 10^22 runs."""
    first = {plan_minibatches(range(8), size=8, num_epochs=1, seed=0, step=step)[0][0][0] for step in range(400)}
    assert first == set(range(8))


def test_members_of_a_group_follow_one_another_and_groups_are_permuted() -> None:
    """Cut as ever: a group that a minibatch has no room for goes on in the next one."""
    members, groups = [3, 5, 6, 7, 9, 11, 12], ["a", "b", "a", "c", "b", "a", "d"]
    whole = {(3, 6, 11), (5, 9), (7,), (12,)}
    orders = set()
    for step in range(20):
        for epoch in plan_minibatches(members, size=4, num_epochs=2, seed=0, step=step, groups=groups):
            assert [len(minibatch) for minibatch in epoch] == [4, 3]
            order, group_of = flat(epoch), dict(zip(members, groups, strict=True))
            runs = [tuple(run) for _, run in groupby(order, key=group_of.__getitem__)]
            assert set(runs) == whole
            orders.add(tuple(runs))
    assert len(orders) > 10
