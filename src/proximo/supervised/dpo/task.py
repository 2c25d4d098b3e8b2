"""The training task of direct preference optimisation (DPO). The loop that drives it: run/loop.py."""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from proximo.algorithms.direct_preference import dpo_loss, implicit_rewards, ipo_loss
from proximo.data.preferences import PreferencePair
from proximo.metrics.values import Mean, MetricValue
from proximo.models.language import LanguageModel
from proximo.supervised.answers import AnswerBatch, answer_batches, answer_logprobs
from proximo.supervised.dpo.recipe import DPOConfig
from proximo.supervised.pair_scores import PairMeasures, pair_scores
from proximo.supervised.pair_task import PairTask
from proximo.supervised.task import TaskInputs


class DPOTask(PairTask[LanguageModel, DPOConfig, AnswerBatch]):
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

    def batches(self, pairs: Sequence[PreferencePair]) -> list[tuple[list[int], AnswerBatch]]:
        """Micro-batches with the reference's log-probs: all chosen answers, then all rejected ones."""
        return answer_batches(
            [pair.prompt_token_ids for pair in pairs],
            [[pair.chosen_token_ids for pair in pairs], [pair.rejected_token_ids for pair in pairs]],
            [[pair.chosen_mask for pair in pairs], [pair.rejected_mask for pair in pairs]],
            reference=self.reference,
            token_budget=self.config.tokens_per_microbatch,
            device=self.model.device,
        )

    def loss(self, batch: AnswerBatch, *, num_pairs: int) -> tuple[Tensor, PairMeasures]:
        logprobs = answer_logprobs(self.model, batch.answers, batch.mask)
        ratios = (logprobs - batch.reference_logprobs).tensor_split(2)
        beta = self.config.beta
        if self.config.loss == "ipo":
            per_pair = ipo_loss(*ratios, beta=beta)
        else:
            per_pair = dpo_loss(*ratios, beta=beta, label_smoothing=self.config.label_smoothing)
        rewards = [implicit_rewards(half.detach(), beta=beta) for half in ratios]
        measures = PairMeasures(scores=pair_scores(*rewards), logprobs=pair_scores(*logprobs.detach().tensor_split(2)))
        return per_pair.sum() / num_pairs, measures
