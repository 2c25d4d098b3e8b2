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

    @property
    def tokens(self) -> Packed:
        """All tokens of the micro-batch."""
        return self.answers.packed


def answer_batches(
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[Sequence[int]]],
    *,
    reference: LanguageModel,
    token_budget: int,
    device: torch.device,
) -> list[tuple[list[int], AnswerBatch]]:
    """The micro-batches of this rank; each comes with the indices of its prompts.

    `answers`: K lists, each with an answer to every prompt. A batch holds all K answers to its prompts. `device`: that
    of the batches.
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
            logprobs = reference.backbone.run_pass(partial(answer_logprobs, reference, packed))
            batches.append((indices, AnswerBatch(answers=packed, reference_logprobs=logprobs)))
    return batches


def answer_logprobs(model: LanguageModel, answers: PackedResponses) -> Tensor:
    """[answers] log-probs of whole answers in nats: sums over their tokens, 0 for an empty answer."""
    return segment_sum(model.response_logprobs(answers).logprobs, answers.response_lengths)
