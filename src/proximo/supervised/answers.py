"""Answers to prompts in micro-batches, with the log-probs that a frozen reference gives them: for DPO and KTO."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from proximo.algorithms.segments import segment_sum
from proximo.models.batching import plan_own_share
from proximo.models.language import LanguageModel
from proximo.models.packing import Packed, PackedResponses, pack_nothing, pack_responses, shareable_prefixes


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerBatch:
    """A micro-batch of N prompts with K answers each, packed: all first answers, then all second ones, and so on."""

    answers: PackedResponses
    reference_logprobs: Tensor
    """[K N] log-probs of whole answers under the reference, in nats."""
    mask: Tensor | None = None
    """[tokens of all answers] bool: True for those that count; None where all do."""

    @property
    def tokens(self) -> Packed:
        """All tokens of the micro-batch."""
        return self.answers.packed


Mask = Sequence[bool] | None
"""Of each token of an answer whether it counts; None where all do."""


def answer_batches(
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[Sequence[int]]],
    masks: Sequence[Sequence[Mask]],
    *,
    reference: LanguageModel,
    token_budget: int,
    device: torch.device,
) -> list[tuple[list[int], AnswerBatch]]:
    """The micro-batches of this rank; each comes with the indices of its prompts.

    `answers`: K lists, each with an answer to every prompt; `masks` has theirs. A batch holds all K answers to its
    prompts. `device`: that of the batches.
    """
    # Equal prompts are computed once, but for the last token (packing.py).
    prefixes = shareable_prefixes(prompts)
    lengths = [
        len(prefix) + sum(len(prompt) - len(prefix) + len(answer) for answer in to_prompt)
        for prompt, prefix, *to_prompt in zip(prompts, prefixes, *answers, strict=True)
    ]
    batches = []
    with torch.no_grad(), reference.backbone.at_work():
        for indices in plan_own_share(lengths, token_budget=token_budget, prefixes=prefixes):
            packed = (
                pack_responses(
                    [prompts[i] for _ in answers for i in indices],
                    [each[i] for each in answers for i in indices],
                    device=device,
                )
                if indices
                else pack_nothing(device)
            )
            of_batch = [(each[i], mask[i]) for each, mask in zip(answers, masks, strict=True) for i in indices]
            mask = _flat_mask(of_batch, device)
            logprobs = reference.backbone.run_pass(partial(answer_logprobs, reference, packed, mask))
            batches.append((indices, AnswerBatch(answers=packed, reference_logprobs=logprobs, mask=mask)))
    return batches


def answer_logprobs(model: LanguageModel, answers: PackedResponses, mask: Tensor | None) -> Tensor:
    """[answers] log-probs of whole answers in nats: sums over their tokens that count, 0 where there is none."""
    logprobs = model.response_logprobs(answers).logprobs
    return segment_sum(logprobs if mask is None else torch.where(mask, logprobs, 0.0), answers.response_lengths)


def _flat_mask(answers: Sequence[tuple[Sequence[int], Mask]], device: torch.device) -> Tensor | None:
    if all(mask is None for _, mask in answers):
        return None
    flat = [counts for answer, mask in answers for counts in ([True] * len(answer) if mask is None else mask)]
    return torch.tensor(flat, dtype=torch.bool, device=device)
