"""Calibration of a reward model: whether its confidence matches its accuracy on labelled pairs or steps.

Under the Bradley-Terry model, the confidence that the response with the higher score is the better one is
sigmoid(|margin|). Pairs are binned by confidence, and each bin's mean confidence is compared with its accuracy.
"""

import math
from collections.abc import Iterable, Sequence


def pair_error(margins: Iterable[float], *, num_bins: int = 10) -> float | None:
    """Expected calibration error of pairs: mean |confidence - accuracy| over bins of confidence, weighted by pairs.

    `margins`: chosen minus rejected score of each pair; those that are NaN are left out. A tie is right by half. The
    bins between 0.5 and 1 are of equal width. None without pairs.
    """
    known = [margin for margin in margins if not math.isnan(margin)]
    width = 0.5 / num_bins
    members: list[list[tuple[float, float]]] = [[] for _ in range(num_bins)]
    for margin in known:
        confidence = 1 / (1 + math.exp(-abs(margin)))
        index = min(int((confidence - 0.5) / width), num_bins - 1)
        members[index].append((confidence, 0.5 if margin == 0 else float(margin > 0)))
    sums = [(len(part), sum(sure for sure, _ in part), sum(right for _, right in part)) for part in members if part]
    gaps = [count * abs(confidences / count - rights / count) for count, confidences, rights in sums]
    return sum(gaps) / len(known) if known else None


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
