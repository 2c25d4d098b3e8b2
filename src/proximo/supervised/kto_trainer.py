"""Kahneman-Tversky optimisation (KTO): its task, and how it is built from a recipe."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from statistics import fmean
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from proximo.algorithms.preferences import implicit_rewards, kto_loss, reference_point
from proximo.data.codec import decode, response_text
from proximo.data.labelled import LabelledOptions, LabelledResponse, load_labelled_responses
from proximo.errors import DataError
from proximo.learner.update import UpdateResult
from proximo.metrics.values import Mean, MetricValue, Sum
from proximo.models.language import LanguageModel
from proximo.models.packing import Packed
from proximo.run.make.data import options_of
from proximo.run.task import Record
from proximo.supervised.building import load_split, start, task_inputs
from proximo.supervised.kto_recipe import ADVISED, KTOConfig, KTORecipe, label_balance
from proximo.supervised.reference import (
    AnswerBatch,
    answer_batches,
    answer_logprobs,
    build_policy_and_reference,
    check_prompts,
)
from proximo.supervised.task import SupervisedTask, TaskInputs, mean_loss


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


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledBatch:
    """A micro-batch of labelled answers."""

    batch: AnswerBatch
    desirable: Tensor
    """[answers] bool."""

    @property
    def tokens(self) -> Packed:
        """All tokens of the micro-batch."""
        return self.batch.tokens


class KTOTask(SupervisedTask[LanguageModel, LabelledResponse, KTOConfig]):
    """Makes desirable answers likelier and undesirable ones less likely, relative to a frozen reference."""

    role: ClassVar[str] = "policy"
    metric_group: ClassVar[str] = "kto"
    best_metric: str | None = "evaluation/loss"
    best_is_lowest: bool = True

    def __init__(
        self,
        inputs: TaskInputs[LanguageModel, LabelledResponse, KTOConfig],
        *,
        reference: LanguageModel,
        max_tokens: int,
    ) -> None:
        """`max_tokens`: the limit of a prompt with its answer, which also holds for a prompt with another answer."""
        super().__init__(inputs)
        self.reference = reference
        self.max_tokens = max_tokens

    def learn(
        self, examples: Sequence[LabelledResponse], *, seed: int | None
    ) -> tuple[UpdateResult, dict[str, MetricValue], int]:
        """One update. The loss is the mean over the answers; all of them have one reference point."""
        point = self.reference_point(examples)
        result = self.learners[self.role].update(
            [batch for _, batch in self.batches(examples)],
            lambda batch: self.loss(batch, point=point, num_examples=len(examples)),
            seed=seed,
        )
        num_desirable = sum(example.desirable for example in examples)
        metrics = label_metrics("kto", reduce(add, result.statistics), point=point) | {
            "kto/loss": mean_loss(result, len(examples)),
            "kto/examples": Sum(len(examples)),
            "kto/desirable_fraction": Mean(num_desirable, len(examples)),
        }
        return result, metrics, sum(example.num_tokens for example in examples)

    @torch.no_grad()
    def evaluate(self, num_rows: int | None = None) -> Record | None:
        """Loss and rewards on the held-out answers, whose reference point is their own. All go to samples.jsonl."""
        held_out = self.held_out[:num_rows]
        if not held_out:
            return None
        point = self.reference_point(held_out)
        loss, order, parts = self.losses_of(
            self.batches(held_out), lambda batch: self.loss(batch, point=point, num_examples=len(held_out))
        )
        total = reduce(add, parts)
        metrics = label_metrics("evaluation", total, point=point) | {
            "evaluation/examples": Sum(len(held_out)),
            "evaluation/loss": Mean(loss * len(held_out), len(held_out)),
        }
        rewards = dict(zip(order, total.rewards, strict=True))
        rows = [label_sample(self.tokenizer, example, rewards[i]) for i, example in enumerate(held_out)]
        return Record(metrics=metrics, samples=rows)

    @torch.no_grad()
    def reference_point(self, examples: Sequence[LabelledResponse]) -> float:
        """z0 of these examples, in nats, over all micro-batches and ranks: each prompt with the answer to another.

        Which answer that is: `answers_to_others`. It is cut where it exceeds `max_tokens` with this prompt. A single
        example, which has no other answer, has 0, as has `reference_point: zero`.
        """
        if self.config.reference_point == "zero" or len(examples) < 2:
            return 0.0
        prompts = [example.prompt_token_ids for example in examples]
        others = [
            _first_tokens(examples[i], self.max_tokens - len(prompt))
            for prompt, i in zip(prompts, answers_to_others(prompts), strict=True)
        ]
        found: dict[int, float] = {}
        for indices, ratios in self.results_of(
            self._batches_of(prompts, others), self._log_ratios, what="the KL term of an update"
        ):
            found |= dict(zip(indices, ratios, strict=True))
        ratios = [found[i] for i in range(len(examples))]  # in one order, however they were cut
        return reference_point(torch.tensor(ratios, dtype=torch.float64)).item()

    def _log_ratios(self, numbered: tuple[list[int], AnswerBatch]) -> tuple[list[int], list[float]]:
        indices, batch = numbered
        return indices, (answer_logprobs(self.model, batch.answers, batch.mask) - batch.reference_logprobs).tolist()

    def batches(self, examples: Sequence[LabelledResponse]) -> list[tuple[list[int], LabelledBatch]]:
        """Micro-batches with the reference's log-probs. Each comes with the indices of its examples."""
        numbered = self._batches_of([example.prompt_token_ids for example in examples], examples)
        device = self.model.device
        return [
            (indices, LabelledBatch(batch=batch, desirable=_flags([examples[i].desirable for i in indices], device)))
            for indices, batch in numbered
        ]

    def _batches_of(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[LabelledResponse]
    ) -> list[tuple[list[int], AnswerBatch]]:
        return answer_batches(
            prompts,
            [[each.response_token_ids for each in answers]],
            [[each.response_mask for each in answers]],
            reference=self.reference,
            token_budget=self.config.tokens_per_microbatch,
            device=self.model.device,
        )

    def loss(self, batch: LabelledBatch, *, point: float, num_examples: int) -> tuple[Tensor, LabelScores]:
        """Sum of a batch's losses divided by `num_examples` (those of the whole update), and its measurements."""
        config, answers = self.config, batch.batch
        logprobs = answer_logprobs(self.model, answers.answers, answers.mask)
        ratios = logprobs - answers.reference_logprobs
        per_answer = kto_loss(
            ratios,
            batch.desirable,
            beta=config.beta,
            reference_point=point,
            desirable_weight=config.desirable_weight,
            undesirable_weight=config.undesirable_weight,
        )
        measures = LabelScores(
            rewards=tuple(implicit_rewards(ratios.detach(), beta=config.beta).tolist()),
            logprobs=tuple(logprobs.detach().tolist()),
            desirable=tuple(batch.desirable.tolist()),
        )
        return per_answer.sum() / num_examples, measures


def answers_to_others(prompts: Sequence[tuple[int, ...]]) -> list[int]:
    """For each prompt the index of a row with another prompt, whose answer it is read with; every row is taken once.

    With distinct prompts it is the next row, and the first one for the last. Otherwise rows of equal prompts stand
    together in that circle, and the way to go is the size of the largest such group. Only a group of more than half of
    the rows meets answers to its own prompt.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, prompt in enumerate(prompts):
        groups.setdefault(prompt, []).append(index)
    circle = [index for group in groups.values() for index in group]
    way = max(map(len, groups.values())) if len(groups) > 1 else 1
    taken = dict(zip(circle, circle[way:] + circle[:way], strict=True))
    return [taken[index] for index in range(len(prompts))]


def _first_tokens(example: LabelledResponse, count: int) -> LabelledResponse:
    """The example with at most so many tokens of its response."""
    mask = example.response_mask
    return replace(
        example,
        response_token_ids=example.response_token_ids[:count],
        response_mask=None if mask is None else mask[:count],
    )


def _flags(values: Sequence[bool], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.bool, device=device)


def build_task(recipe: KTORecipe) -> KTOTask:
    """Load data, then models, so that a bad data file fails before any weights are loaded."""
    begun = start(recipe, {"policy": recipe.model, "reference": recipe.reference})
    split = load_split(load_labelled_responses, begun, options_of(LabelledOptions, recipe.data))
    check_prompts(split, "answers")
    balance = _balance_note(split.training, recipe.kto)
    longest = max(row.num_tokens for row in split)
    if recipe.kto.reference_point == "kl":  # a prompt also meets the answer to another one
        prompt = max(len(row.prompt_token_ids) for row in split)
        answer = max(len(row.response_token_ids) for row in split)
        longest = min(recipe.data.max_tokens, prompt + answer)
    models = build_policy_and_reference(recipe, begun, longest=longest)
    inputs = task_inputs(
        recipe, models.policy, begun, split, fingerprint=models.fingerprint, rows="answers", notes=[balance]
    )
    return KTOTask(inputs, reference=models.reference, max_tokens=recipe.data.max_tokens)


def _balance_note(training: Sequence[LabelledResponse], config: KTOConfig) -> str:
    """How many answers have which label, and advice if one weighs too much.

    Raises DataError if all have the same label.
    """
    num_desirable = sum(example.desirable for example in training)
    num_undesirable = len(training) - num_desirable
    if not num_desirable or not num_undesirable:
        label, other = ("true", "false") if num_desirable else ("false", "true")
        raise DataError(
            f"all {len(training):,} training answers are labelled {label}, and KTO learns from both labels: add "
            f"answers labelled {other}, or fine-tune on good answers with `proximo sft`"
        )
    ratio = label_balance(num_desirable, num_undesirable, config.desirable_weight, config.undesirable_weight)
    note = f"labels: {num_desirable:,} desirable, {num_undesirable:,} undesirable; by weight {ratio:.3g} to 1"
    low, high = ADVISED
    if low <= ratio <= high:
        return note
    weight = "undesirable_weight" if ratio > high else "desirable_weight"
    factor = ratio / high if ratio > high else low / ratio
    return (
        f"{note}. {low:g} to {high:.2f} is advised: set kto.{weight} to "
        f"{getattr(config, weight) * factor:.3g} or so (docs/kto.md)"
    )
