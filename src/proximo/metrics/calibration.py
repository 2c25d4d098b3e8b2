"""Calibration of a reward model: whether its confidence matches its accuracy on labelled pairs or steps.

Under the Bradley-Terry model, the confidence that the response with the higher score is the better one is
sigmoid(|margin|). Pairs are binned by confidence, and each bin's mean confidence is compared with its accuracy.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationBin:
    """The pairs whose confidences lie in one interval."""

    num_pairs: int
    confidence: float
    """Mean confidence of these pairs."""
    accuracy: float
    """Share of these pairs whose chosen response has the higher score; a tie counts half."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """The non-empty bins between confidence 0.5 and 1."""

    bins: tuple[CalibrationBin, ...]

    @property
    def num_pairs(self) -> int:
        return sum(part.num_pairs for part in self.bins)

    @property
    def error(self) -> float | None:
        """Expected calibration error: mean |confidence - accuracy| over bins, weighted by pairs; None without pairs."""
        if not self.num_pairs:
            return None
        return sum(part.num_pairs * abs(part.confidence - part.accuracy) for part in self.bins) / self.num_pairs


def calibration(margins: Iterable[float], *, num_bins: int = 10) -> Calibration:
    """Bins of equal width. `margins`: chosen minus rejected score of each pair; those that are NaN are left out."""
    width = 0.5 / num_bins
    members: list[list[tuple[float, float]]] = [[] for _ in range(num_bins)]
    for margin in margins:
        if math.isnan(margin):
            continue
        confidence = 1 / (1 + math.exp(-abs(margin)))
        index = min(int((confidence - 0.5) / width), num_bins - 1)
        members[index].append((confidence, 0.5 if margin == 0 else float(margin > 0)))
    bins = tuple(_bin(pairs) for pairs in members if pairs)
    return Calibration(bins=bins)


def probability_error(probabilities: Sequence[float], labels: Sequence[float], *, num_bins: int = 10) -> float | None:
    """Expected calibration error of probabilities: mean |mean probability - mean label| over bins, weighted by entries.

    The bins of probability are of equal width. A label is 0, 1 or itself a probability. None without entries, NaN where
    a probability is NaN.
    """
    if any(map(math.isnan, probabilities)):
        return math.nan
    members: list[list[tuple[float, float]]] = [[] for _ in range(num_bins)]
    for probability, label in zip(probabilities, labels, strict=True):
        members[min(int(probability * num_bins), num_bins - 1)].append((probability, label))
    gaps = [abs(sum(probability - label for probability, label in part)) for part in members]
    return sum(gaps) / len(labels) if labels else None


def _bin(pairs: Sequence[tuple[float, float]]) -> CalibrationBin:
    return CalibrationBin(
        num_pairs=len(pairs),
        confidence=sum(confidence for confidence, _ in pairs) / len(pairs),
        accuracy=sum(correct for _, correct in pairs) / len(pairs),
    )
