"""The training task of direct preference optimisation (DPO). The loop that drives it: run/loop.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from proximo.algorithms.direct_preference import dpo_loss, implicit_rewards, ipo_loss
from proximo.algorithms.segments import segment_sum
from proximo.data.preferences import PreferencePair
from proximo.metrics.values import Mean, MetricValue
from proximo.models.batching import plan_own_share
from proximo.models.language import LanguageModel
from proximo.models.packing import PackedResponses, pack_nothing, pack_responses, shareable_prefixes
from proximo.supervised.dpo.recipe import DPOConfig
from proximo.supervised.pair_scores import PairMeasures, pair_scores
from proximo.supervised.pair_task import PairTask
from proximo.supervised.task import TaskInputs


@dataclass(frozen=True, kw_only=True, slots=True)
class PairBatch:
    """A micro-batch of pairs, packed: all prompts with chosen responses, then all prompts with rejected ones."""

    answers: PackedResponses
    num_pairs: int
    reference_logprobs: Tensor
    """[2 num_pairs] log-probs of whole responses under the reference, in nats."""


class DPOTask(PairTask[LanguageModel, DPOConfig, PairBatch]):
    """Trains the policy to prefer the chosen response of a pair, relative to a frozen reference."""

    role: ClassVar[str] = "policy"
    metric_group: ClassVar[str] = "dpo"
    # Not accuracy, which stays flat while the policy becomes overconfident on its pairs; the loss then rises.
    best_metric: str | None = "evaluation/loss"
    best_is_lowest: bool = True

    def __init__(
        self, inputs: TaskInputs[LanguageModel, PreferencePair, DPOConfig], *, reference: LanguageModel
    ) -> None:
        super().__init__(inputs)
        self.reference = reference

    def training_metrics(self, total: PairMeasures) -> dict[str, MetricValue]:
        assert total.logprobs is not None
        return {
            "dpo/accuracy": Mean(total.scores.correct, len(total.scores.chosen)),
            "dpo/margin": Mean.of(total.scores.gaps),
            "dpo/reward_chosen": Mean.of(total.scores.chosen),
            "dpo/reward_rejected": Mean.of(total.scores.rejected),
            "dpo/logprob_chosen": Mean.of(total.logprobs.chosen),
            "dpo/logprob_rejected": Mean.of(total.logprobs.rejected),
        }

    def evaluation_metrics(self, total: PairMeasures) -> dict[str, MetricValue]:
        assert total.logprobs is not None
        return super().evaluation_metrics(total) | {
            "evaluation/logprob_chosen": Mean.of(total.logprobs.chosen),
            "evaluation/logprob_rejected": Mean.of(total.logprobs.rejected),
        }

    def batches(self, pairs: Sequence[PreferencePair]) -> list[tuple[list[int], PairBatch]]:
        """Micro-batches with the reference's log-probs."""
        # A pair computes its prompt once, but for the last token (packing.py).
        prefixes = shareable_prefixes([pair.prompt_token_ids for pair in pairs])
        plan = plan_own_share(
            [pair.num_tokens - len(prefix) for pair, prefix in zip(pairs, prefixes, strict=True)],
            token_budget=self.config.tokens_per_microbatch,
            prefixes=prefixes,
        )
        batches = []
        with torch.no_grad(), self.reference.backbone.at_work():
            for indices in plan:
                answers = self._answers([pairs[i] for i in indices])
                reference = self.reference.backbone.run_pass(partial(answer_logprobs, self.reference, answers))
                batch = PairBatch(answers=answers, num_pairs=len(indices), reference_logprobs=reference)
                batches.append((indices, batch))
        return batches

    def _answers(self, pairs: Sequence[PreferencePair]) -> PackedResponses:
        if not pairs:
            return pack_nothing(self.model.device)
        return pack_responses(
            [pair.prompt_token_ids for pair in (*pairs, *pairs)],
            [*(pair.chosen_token_ids for pair in pairs), *(pair.rejected_token_ids for pair in pairs)],
            device=self.model.device,
        )

    def loss(self, batch: PairBatch, *, num_pairs: int) -> tuple[Tensor, PairMeasures]:
        logprobs = answer_logprobs(self.model, batch.answers)
        ratios = (logprobs - batch.reference_logprobs).tensor_split(2)
        beta = self.config.beta
        if self.config.loss == "ipo":
            per_pair = ipo_loss(*ratios, beta=beta)
        else:
            per_pair = dpo_loss(*ratios, beta=beta, label_smoothing=self.config.label_smoothing)
        rewards = [implicit_rewards(half.detach(), beta=beta) for half in ratios]
        measures = PairMeasures(scores=pair_scores(*rewards), logprobs=pair_scores(*logprobs.detach().tensor_split(2)))
        return per_pair.sum() / num_pairs, measures


def answer_logprobs(model: LanguageModel, answers: PackedResponses) -> Tensor:
    """[num_sequences] log-probs of whole responses in nats: sums over their tokens, 0 for an empty response."""
    return segment_sum(model.response_logprobs(answers).logprobs, answers.response_lengths)
