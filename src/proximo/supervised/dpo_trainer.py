"""Direct preference optimisation (DPO): its task, and how it is built from a recipe."""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from proximo.algorithms.preferences import dpo_loss, implicit_rewards, ipo_loss
from proximo.data.preferences import PreferencePair
from proximo.metrics.values import Mean, MetricValue
from proximo.models.language import LanguageModel
from proximo.supervised.building import start, task_inputs
from proximo.supervised.dpo_recipe import DPOConfig, DPORecipe
from proximo.supervised.pairs import PairMeasures, PairTask, load_pairs, longest_pair, pair_scores, unused_margins
from proximo.supervised.reference import (
    AnswerBatch,
    answer_batches,
    answer_logprobs,
    build_policy_and_reference,
    check_prompts,
)
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


def build_task(recipe: DPORecipe) -> DPOTask:
    """Load data, then models, so that a bad data file fails before any weights are loaded."""
    begun = start(recipe, {"policy": recipe.model, "reference": recipe.reference})
    pairs = load_pairs(recipe.data, begun, learned="responses")
    check_prompts(pairs, "pairs")
    models = build_policy_and_reference(recipe, begun, longest=longest_pair(pairs))
    inputs = task_inputs(
        recipe,
        models.policy,
        begun,
        pairs,
        fingerprint=models.fingerprint,
        rows="pairs",
        notes=unused_margins(pairs.training, "DPO's loss has no place for them"),
    )
    return DPOTask(inputs, reference=models.reference)
