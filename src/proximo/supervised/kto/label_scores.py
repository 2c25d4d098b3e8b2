"""Turns the implicit rewards of labelled answers into metrics and samples."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from transformers import PreTrainedTokenizerBase

from proximo.data.detokenise import decode, response_text
from proximo.data.labelled import LabelledResponse
from proximo.metrics.values import Mean, MetricValue


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelScores:
    """Measurements of labelled answers, in one order. The sum of two holds the answers of both."""

    rewards: tuple[float, ...]
    """Implicit rewards, beta times the log-ratio."""
    logprobs: tuple[float, ...]
    """Log-probs of whole answers under the policy, in nats."""
    desirable: tuple[bool, ...]

    def __add__(self, other: "LabelScores") -> "LabelScores":
        return LabelScores(
            rewards=self.rewards + other.rewards,
            logprobs=self.logprobs + other.logprobs,
            desirable=self.desirable + other.desirable,
        )

    def of(self, values: Sequence[float], *, desirable: bool) -> list[float]:
        """Those of the `values` whose answer has this label."""
        return [value for value, label in zip(values, self.desirable, strict=True) if label == desirable]


def label_metrics(group: str, total: LabelScores, *, point: float) -> dict[str, MetricValue]:
    """Rewards and log-probs by label, how well they tell the labels apart, and the reference point `point` in nats."""
    desirable, undesirable = (total.of(total.rewards, desirable=label) for label in (True, False))
    auc = margin = Mean(0, 0)
    if desirable and undesirable:
        auc = Mean(area_under_curve(desirable, undesirable), 1)
        margin = Mean(fmean(desirable) - fmean(undesirable), 1)
    return {
        f"{group}/reference_point": Mean(point, 1),
        f"{group}/auc": auc,
        f"{group}/margin": margin,
        f"{group}/reward_desirable": Mean.of(desirable),
        f"{group}/reward_undesirable": Mean.of(undesirable),
        f"{group}/logprob_desirable": Mean.of(total.of(total.logprobs, desirable=True)),
        f"{group}/logprob_undesirable": Mean.of(total.of(total.logprobs, desirable=False)),
    }


def area_under_curve(higher: Sequence[float], lower: Sequence[float]) -> float:
    """The fraction of pairs of one number of each in which the first is the higher one; a tie counts half.

    NaN if one of them is NaN. Neither may be empty.
    """
    if any(map(math.isnan, (*higher, *lower))):
        return math.nan
    ordered = sorted(lower)
    below = sum(bisect_left(ordered, number) + bisect_right(ordered, number) for number in higher)
    return below / (2 * len(higher) * len(lower))


def label_sample(tokenizer: PreTrainedTokenizerBase, example: LabelledResponse, reward: float) -> dict[str, Any]:
    """A row of samples.jsonl: a labelled answer with its implicit reward."""
    return {
        "kind": "labelled",
        "prompt_id": example.id,
        "prompt": decode(tokenizer, example.prompt_token_ids),
        "response": response_text(tokenizer, example.prompt_token_ids, example.response_token_ids),
        "desirable": example.desirable,
        "score": reward,
    }
