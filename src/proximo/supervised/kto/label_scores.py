"""Turns the implicit rewards of labelled answers into metrics and samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from transformers import PreTrainedTokenizerBase

from proximo.data.labelled import LabelledResponse
from proximo.metrics.values import Mean, MetricValue
from proximo.models.pretrained.vocabulary import decode_text


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


def label_metrics(group: str, total: LabelScores, *, point: float, beta: float) -> dict[str, MetricValue]:
    """Rewards and log-probs by label, accuracy and reference point, as metrics of `group`. `point`: z0, in nats."""
    desirable, undesirable = (total.of(total.rewards, desirable=label) for label in (True, False))
    accuracy = margin = Mean(0, 0)
    if desirable and undesirable:
        above, wrongly_above = (fmean(_above(beta * point, rewards)) for rewards in (desirable, undesirable))
        accuracy = Mean((above + 1 - wrongly_above) / 2, 1)
        margin = Mean(fmean(desirable) - fmean(undesirable), 1)
    return {
        f"{group}/reference_point": Mean(point, 1),
        f"{group}/accuracy": accuracy,
        f"{group}/margin": margin,
        f"{group}/reward_desirable": Mean.of(desirable),
        f"{group}/reward_undesirable": Mean.of(undesirable),
        f"{group}/logprob_desirable": Mean.of(total.of(total.logprobs, desirable=True)),
        f"{group}/logprob_undesirable": Mean.of(total.of(total.logprobs, desirable=False)),
    }


def _above(bound: float, rewards: Sequence[float]) -> list[float]:
    """1 for a reward above the bound, 1/2 at it, else 0."""
    return [(reward > bound) + 0.5 * (reward == bound) for reward in rewards]


def label_sample(tokenizer: PreTrainedTokenizerBase, example: LabelledResponse, reward: float) -> dict[str, Any]:
    """A row of samples.jsonl: a labelled answer with its implicit reward."""
    return {
        "kind": "labelled",
        "prompt_id": example.id,
        "prompt": decode_text(tokenizer, example.prompt_token_ids),
        "response": decode_text(tokenizer, example.response_token_ids),
        "desirable": example.desirable,
        "score": reward,
    }
