"""Divides responses into minibatches: a new permutation for every epoch, as a function of position. Integers only."""

from collections.abc import Hashable, Sequence

import numpy as np


def plan_minibatches(
    members: Sequence[int],
    *,
    size: int,
    num_epochs: int,
    seed: int,
    step: int,
    groups: Sequence[Hashable] | None = None,
) -> list[list[list[int]]]:
    """epoch -> minibatch -> members, each member once per epoch; the last minibatch of an epoch may be smaller.

    `groups`: the group of each member. Then groups are permuted, and the members of a group stay together. None
    permutes members.
    The result depends only on the arguments, so a resumed run that repeats a step sees the same minibatches.
    """
    together: dict[Hashable, list[int]] = {}
    for place, member in enumerate(members):
        together.setdefault(place if groups is None else groups[place], []).append(member)
    units = list(together.values())
    plan = []
    for epoch in range(num_epochs):
        order = np.random.Generator(np.random.Philox(key=[seed, (step << 16) + epoch])).permutation(len(units))
        shuffled = [member for i in order for member in units[i]]
        plan.append([shuffled[start : start + size] for start in range(0, len(shuffled), size)])
    return plan


def num_minibatches(num_members: int, size: int) -> int:
    """Minibatches of one epoch."""
    return -(-num_members // size)
