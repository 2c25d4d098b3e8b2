"""How many rows each source gives to a mixture, and which. Not their order, which is the epoch's (`order.py`)."""

from collections.abc import Sequence

from proximo.data.order import shuffled


def mixture_counts(available: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Rows of each source in one epoch, so that their shares are the weights and no row is taken twice.

    The source that runs out first gives all its rows; the others give their share beside it.
    """
    scale = min(count / weight for count, weight in zip(available, weights, strict=True))
    return [min(count, max(1, round(weight * scale))) for count, weight in zip(available, weights, strict=True)]


def drawn_rows(available: int, count: int, *, seed: int, source: int) -> list[int]:
    """Which rows a source gives: a seeded draw without repeats, in file order."""
    if count >= available:
        return list(range(available))
    return sorted(shuffled(available, seed=seed, purpose=f"mixture {source}")[:count])
