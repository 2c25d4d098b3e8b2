"""Direct preference optimisation of a policy, step by step. Not its recipe (dpo.py) nor the run around it
(run/loop.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from proximo.algorithms.direct_preference import dpo_loss, implicit_rewards, ipo_loss
from proximo.algorithms.segments import segment_sum
from proximo.config.dpo import DPOConfig
from proximo.data.preferences import PreferencePair
from proximo.learner.update import UpdateResult
from proximo.metrics.calibration import calibration
from proximo.metrics.trainers import Trainer
from proximo.metrics.values import Last, Mean, MetricValue, Sum
from proximo.models.batching import plan_batches
from proximo.models.language import LanguageModel
from proximo.models.packing import PackedResponses, pack_responses
from proximo.run.logs import Record
from proximo.supervised.pair_scores import PairScores, pair_metrics, pair_sample, pair_scores
from proximo.supervised.task import SupervisedTask, mean_loss


@dataclass(frozen=True, kw_only=True, slots=True)
class PairBatch:
    """Pairs of one pass: all chosen answers behind their prompts, then all rejected ones, packed."""

    answers: PackedResponses
    num_pairs: int
    reference_logprobs: Tensor
    """[2 num_pairs] of whole answers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairMeasures:
    """What is seen of some pairs."""

    rewards: PairScores
    """Implicit ones."""
    logprobs: PairScores
    """Of whole answers under the policy, in nats."""

    def __add__(self, other: "PairMeasures") -> "PairMeasures":
        return PairMeasures(rewards=self.rewards + other.rewards, logprobs=self.logprobs + other.logprobs)


class DPOTask(SupervisedTask[LanguageModel, PreferencePair, DPOConfig]):
    """Makes the chosen answer of a pair likelier than the rejected one, as measured against a reference."""

    trainer: Trainer = Trainer.DPO
    role: ClassVar[str] = "policy"
    metric_group: ClassVar[str] = "dpo"
    # Accuracy stays level while the policy grows too sure of its pairs; the loss then rises.
    best_metric: str | None = "evaluation/loss"
    best_is_lowest: bool = True

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: PreTrainedTokenizerBase,
        pairs: Sequence[PreferencePair],
        held_out: Sequence[PreferencePair],
        *,
        reference: LanguageModel,
        config: DPOConfig,
        seed: int,
        inputs_fingerprint: Mapping[str, Any],
        notes: Sequence[str] = (),
    ) -> None:
        super().__init__(
            model,
            tokenizer,
            pairs,
            held_out,
            config=config,
            seed=seed,
            inputs_fingerprint=inputs_fingerprint,
            notes=notes,
        )
        self.reference = reference

    def learn(
        self, chosen: Sequence[PreferencePair], *, seed: int | None
    ) -> tuple[UpdateResult, dict[str, MetricValue], int]:
        """One update; the loss is the mean over the pairs."""
        result = self.learners[self.role].update(
            [batch for _, batch in self._batches(chosen)],
            lambda batch: self._loss(batch, num_pairs=len(chosen)),
            seed=seed,
        )
        total = reduce(add, result.statistics)
        own: dict[str, MetricValue] = {
            "dpo/loss": mean_loss(result, len(chosen)),
            "dpo/accuracy": Mean(total.rewards.correct, len(total.rewards.chosen)),
            "dpo/margin": Mean.of(total.rewards.gaps),
            "dpo/reward_chosen": Mean.of(total.rewards.chosen),
            "dpo/reward_rejected": Mean.of(total.rewards.rejected),
            "dpo/logprob_chosen": Mean.of(total.logprobs.chosen),
            "dpo/logprob_rejected": Mean.of(total.logprobs.rejected),
            "dpo/pairs": Sum(len(chosen)),
        }
        return result, own, sum(pair.num_tokens for pair in chosen)

    @torch.no_grad()
    def evaluate(self, num_rows: int | None = None) -> Record | None:
        """The loss and what the implicit rewards say of the held-out pairs; each goes to samples.jsonl with its own."""
        held_out = self.held_out[:num_rows]
        if not held_out:
            return None
        rewards: dict[int, tuple[float, float]] = {}
        loss, parts = 0.0, []
        for indices, batch in self._batches(held_out):
            value, part = self._loss(batch, num_pairs=len(held_out))
            loss += value.item()
            parts.append(part)
            rewards |= dict(zip(indices, zip(part.rewards.chosen, part.rewards.rejected, strict=True), strict=True))
        total = reduce(add, parts)
        metrics = pair_metrics("evaluation", total.rewards) | {
            "evaluation/pairs": Sum(len(held_out)),
            "evaluation/loss": Mean(loss * len(held_out), len(held_out)),
            "evaluation/logprob_chosen": Mean.of(total.logprobs.chosen),
            "evaluation/logprob_rejected": Mean.of(total.logprobs.rejected),
            "evaluation/calibration_error": Last(calibration(total.rewards.gaps).error),
        }
        rows = [pair_sample(self.tokenizer, pair, rewards[i]) for i, pair in enumerate(held_out)]
        return Record(metrics=metrics, samples=rows)

    def _batches(self, pairs: Sequence[PreferencePair]) -> list[tuple[list[int], PairBatch]]:
        """With the reference's log-probs."""
        plan = plan_batches([pair.num_tokens for pair in pairs], token_budget=self.config.tokens_per_microbatch)
        batches = []
        for indices in plan:
            members = [pairs[i] for i in indices]
            answers = pack_responses(
                [pair.prompt_token_ids for pair in (*members, *members)],
                [*(pair.chosen_token_ids for pair in members), *(pair.rejected_token_ids for pair in members)],
                device=self.model.device,
            )
            with torch.no_grad():
                reference = answer_logprobs(self.reference, answers)
            batch = PairBatch(answers=answers, num_pairs=len(members), reference_logprobs=reference)
            batches.append((indices, batch))
        return batches

    def _loss(self, batch: PairBatch, *, num_pairs: int) -> tuple[Tensor, PairMeasures]:
        logprobs = answer_logprobs(self.model, batch.answers)
        ratios = (logprobs - batch.reference_logprobs).split(batch.num_pairs)
        beta = self.config.beta
        if self.config.loss == "ipo":
            per_pair = ipo_loss(*ratios, beta=beta)
        else:
            per_pair = dpo_loss(*ratios, beta=beta, label_smoothing=self.config.label_smoothing)
        rewards = [implicit_rewards(part.detach(), beta=beta) for part in ratios]
        measures = PairMeasures(
            rewards=pair_scores(*rewards), logprobs=pair_scores(*logprobs.detach().split(batch.num_pairs))
        )
        return per_pair.sum() / num_pairs, measures


def answer_logprobs(model: LanguageModel, answers: PackedResponses) -> Tensor:
    """[S] log-probs of whole answers, in nats: sums over their tokens, 0 for an empty one."""
    return segment_sum(model.response_logprobs(answers).logprobs, answers.response_lengths)
