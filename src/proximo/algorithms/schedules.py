"""The learning rate as a function of position, so a resumed run needs no saved state."""

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate_factor(
    update: int, *, num_updates: int, warmup_updates: int = 0, kind: Schedule = "constant", floor: float = 0.0
) -> float:
    """The factor of the peak learning rate at one update (0 is the first).

    Warm-up rises in equal steps from 1 / (warmup_updates + 1) at the first update, so that no update has rate 0, to 1
    at update `warmup_updates`. From there `linear` and `cosine` fall to `floor` at update `num_updates`, one after the
    last, and remain there. `constant` stays at 1 and ignores `floor`.
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
