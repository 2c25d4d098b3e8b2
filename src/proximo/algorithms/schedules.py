"""The learning rate as a function of position. No state, and so nothing to save for a resumed run."""

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate_factor(
    update: int, *, num_updates: int, warmup_updates: int = 0, kind: Schedule = "constant", floor: float = 0.0
) -> float:
    """What the peak learning rate is multiplied with at one update (0 is the first).

    Warm-up climbs in equal steps, 1 / (warmup_updates + 1) at the first update, so that none is wasted at rate 0, to 1
    at update `warmup_updates`. From there `linear` and `cosine` fall, to reach `floor` at update `num_updates`, one
    after the last; beyond, they stay there. `constant` stays at 1 and has no use for `floor`.
    """
    if update < warmup_updates:
        return (update + 1) / (warmup_updates + 1)
    if kind == "constant":
        return 1.0
    if update >= num_updates:
        return floor
    progress = (update - warmup_updates) / (num_updates - warmup_updates)
    remaining = 1 - progress if kind == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return floor + (1 - floor) * remaining
