"""Which responses an update sees: a fresh permutation for every epoch, a function of position. Integers only."""

from collections.abc import Sequence

import numpy as np


def plan_minibatches(
    members: Sequence[int], *, size: int, num_epochs: int, seed: int, step: int
) -> list[list[list[int]]]:
    """epoch -> minibatch -> members, each member once per epoch; the last minibatch of an epoch may be smaller.

    Depends on its arguments alone, so an interrupted run that redoes a step sees the same minibatches.
    """
    plan = []
    for epoch in range(num_epochs):
        order = np.random.Generator(np.random.Philox(key=[seed, (step << 16) + epoch])).permutation(len(members))
        shuffled = [members[i] for i in order]
        plan.append([shuffled[start : start + size] for start in range(0, len(shuffled), size)])
    return plan


def num_minibatches(num_members: int, size: int) -> int:
    """Minibatches of one epoch."""
    return -(-num_members // size)
