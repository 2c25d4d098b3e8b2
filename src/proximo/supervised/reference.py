"""What DPO and KTO have alike: a policy beside a frozen reference, and answers with the log-probs of both."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from proximo.algorithms.masking import segment_sum
from proximo.errors import DataError
from proximo.models.language import LanguageModel
from proximo.models.packing import (
    Packed,
    PackedResponses,
    pack_nothing,
    pack_responses,
    plan_own_share,
    shareable_prefixes,
)
from proximo.models.sharing import base_alone
from proximo.models.transformers_model import check_lengths, disable_dropout
from proximo.run.make.models import build_language_model, build_reference
from proximo.run.make.sharding import shard_model
from proximo.run.resumption import inputs_fingerprint
from proximo.supervised.building import Start
from proximo.supervised.recipes import ReferenceRecipe


class Prompted(Protocol):
    """A row of data with a prompt."""

    @property
    def id(self) -> str: ...
    @property
    def prompt_token_ids(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyAndReference:
    """The models of a task, as they lie on this rank."""

    policy: LanguageModel
    reference: LanguageModel
    fingerprint: Mapping[str, Any]
    """Of all that the run reads (`run/task.py::Task.inputs_fingerprint`)."""


def build_policy_and_reference(recipe: ReferenceRecipe, begun: Start, *, longest: int) -> PolicyAndReference:
    """Load both models, without dropout. `longest`: tokens of the longest prompt with its answer.

    Raises ConfigError if a model cannot read so many tokens.
    """
    tokenizer, device_spec = begun.tokenizer, begun.device_spec
    policy = build_language_model(recipe.model, tokenizer, device_spec=device_spec)
    disable_dropout(policy.model)
    if recipe.reference is not None:
        reference = build_reference(recipe.reference, tokenizer, device_spec=device_spec)
    else:
        reference = base_alone(policy) if policy.has_adapter else policy.frozen_copy()
    for role, model in {"policy": policy, "reference": reference}.items():
        check_lengths(model.base.config, role=role, max_prompt_tokens=longest, max_response_tokens=0)
    fingerprint = inputs_fingerprint(begun.rows, tokenizer, _unsaved_models(policy, reference))
    reference.narrow_frozen(beside=[policy.model])
    shard_model(policy, recipe.devices, role="model", beside=[reference.model])
    shard_model(reference, recipe.devices, role="reference", beside=[policy.model])
    return PolicyAndReference(policy=policy, reference=reference, fingerprint=fingerprint)


def _unsaved_models(policy: LanguageModel, reference: LanguageModel) -> dict[str, nn.Module]:
    """The model that no checkpoint of this run holds: it is read from its own folder at every start."""
    return {"policy_base": policy.model} if policy.has_adapter else {"reference": reference.model}


def check_prompts(rows: Iterable[Prompted], what: str) -> None:
    """Raises DataError if a row has an empty prompt: its first response token would have no preceding token.

    `what`: the rows in the message, `pairs`.
    """
    num_rows, no_prompt = 0, []
    for row in rows:
        num_rows += 1
        if not row.prompt_token_ids:
            no_prompt.append(row.id)
    if no_prompt:
        raise DataError(
            f"{len(no_prompt):,} of {num_rows:,} {what} have no prompt, the first of them {no_prompt[0]}, and the "
            "tokenizer puts no BOS before the answer, so that nothing predicts its first token: give the rows a "
            "prompt, or take a tokenizer with a BOS"
        )


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
