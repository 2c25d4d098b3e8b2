"""How far the confidence of a reward model can be believed. Not its training, and no tensors.

A reward model gives a pair of answers the odds exp(margin), so it is sigmoid(|margin|) sure that the answer with the
higher score is the better one. Over pairs whose order is known, that confidence is compared with how often it holds.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationBin:
    """The pairs whose confidence lies in [low, high)."""

    low: float
    high: float
    num_pairs: int
    confidence: float
    """Mean confidence of these pairs."""
    accuracy: float
    """Share of these pairs where the answer with the higher score was the chosen one; a tie counts half."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """The bins that hold any pairs, from 0.5 to 1."""

    bins: tuple[CalibrationBin, ...]

    @property
    def num_pairs(self) -> int:
        return sum(part.num_pairs for part in self.bins)

    @property
    def error(self) -> float | None:
        """Expected calibration error: mean |confidence - accuracy| over bins, weighted by pairs. None without any."""
        if not self.num_pairs:
            return None
        return sum(part.num_pairs * abs(part.confidence - part.accuracy) for part in self.bins) / self.num_pairs


def calibration(margins: Iterable[float], *, num_bins: int = 10) -> Calibration:
    """Calibration over pairs, from the chosen score minus the rejected score of each."""
    width = 0.5 / num_bins
    members: list[list[tuple[float, float]]] = [[] for _ in range(num_bins)]
    for margin in margins:
        confidence = 1 / (1 + math.exp(-abs(margin)))
        index = min(int((confidence - 0.5) / width), num_bins - 1)
        members[index].append((confidence, 0.5 if margin == 0 else float(margin > 0)))
    bins = tuple(_bin(index, width, pairs) for index, pairs in enumerate(members) if pairs)
    return Calibration(bins=bins)


def _bin(index: int, width: float, pairs: Sequence[tuple[float, float]]) -> CalibrationBin:
    return CalibrationBin(
        low=0.5 + index * width,
        high=0.5 + (index + 1) * width,
        num_pairs=len(pairs),
        confidence=sum(confidence for confidence, _ in pairs) / len(pairs),
        accuracy=sum(right for _, right in pairs) / len(pairs),
    )
