"""Which trainer a run belongs to, and which of its numbers are worth watching. Not the trainers themselves."""

from collections.abc import Iterable, Mapping
from enum import StrEnum


class Trainer(StrEnum):
    """The kinds of run."""

    SFT = "sft"
    REWARD = "reward"
    DPO = "dpo"
    PPO = "ppo"

    @classmethod
    def of_metrics(cls, names: Iterable[str]) -> "Trainer | None":
        """The trainer that records such metrics; None where the names give nothing away."""
        known = set(names)
        groups = {name.partition("/")[0] for name in known}
        if groups & {"policy", "kl", "score", "response"} or "evaluation/score" in known:
            return cls.PPO
        if "dpo" in groups or "evaluation/logprob_chosen" in known:
            return cls.DPO
        if "reward_model" in groups or "evaluation/pair_accuracy" in known:
            return cls.REWARD
        return cls.SFT if groups & {"sft", "evaluation"} else None


WATCHED: Mapping[Trainer, Mapping[str, str]] = {
    Trainer.SFT: {
        "sft/loss": "loss",
        "evaluation/loss": "held-out loss",
        "evaluation/bits_per_character": "bits/char",
        "sft/gradient_norm": "gradient",
        "sft/learning_rate": "lr",
        "throughput/train_tokens_per_second": "tokens/s",
    },
    Trainer.REWARD: {
        "reward_model/loss": "loss",
        "reward_model/pair_accuracy": "accuracy",
        "reward_model/margin_mean": "margin",
        "evaluation/pair_accuracy": "held-out accuracy",
        "reward_model/gradient_norm": "gradient",
        "throughput/train_tokens_per_second": "tokens/s",
    },
    Trainer.DPO: {
        "dpo/loss": "loss",
        "dpo/accuracy": "accuracy",
        "dpo/margin": "margin",
        "evaluation/pair_accuracy": "held-out accuracy",
        "dpo/logprob_chosen": "log-prob chosen",
        "dpo/gradient_norm": "gradient",
        "throughput/train_tokens_per_second": "tokens/s",
    },
    Trainer.PPO: {
        "score/mean": "score",
        "gold/mean": "gold",
        "evaluation/score": "held-out score",
        "evaluation/gold": "held-out gold",
        "kl/sequence": "kl",
        "response/tokens_mean": "length",
        "policy/entropy": "entropy",
        "policy/clip_fraction": "clipped",
        "value/explained_variance": "explained var",
        "group/effective_fraction": "effective",
        "throughput/rollout_tokens_per_second": "tokens/s",
    },
}
"""Metric name -> the short word for it in progress lines."""
