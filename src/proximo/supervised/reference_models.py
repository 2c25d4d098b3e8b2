"""Builds the policy and the frozen reference of DPO and KTO, and checks the data that they read."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from transformers import PreTrainedTokenizerBase

from proximo.errors import DataError
from proximo.models.context_length import check_lengths
from proximo.models.dropout import disable_dropout
from proximo.models.language import LanguageModel
from proximo.models.narrowing import narrow_frozen
from proximo.models.sharing.shared_base import base_alone
from proximo.run.build.data import SplitRows
from proximo.run.build.models import DeviceSpec, build_language_model, build_reference
from proximo.run.build.sharding import shard_model
from proximo.run.resume_fingerprint import inputs_fingerprint
from proximo.supervised.reference_recipe import ReferenceRecipe


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


def build_policy_and_reference(
    recipe: ReferenceRecipe,
    tokenizer: PreTrainedTokenizerBase,
    rows: SplitRows,
    *,
    longest: int,
    device_spec: DeviceSpec,
) -> PolicyAndReference:
    """Load both models, without dropout. `longest`: tokens of the longest prompt with its answer.

    Raises ConfigError if a model cannot read so many tokens.
    """
    policy = build_language_model(recipe.model, tokenizer, device_spec=device_spec)
    disable_dropout(policy.model)
    if recipe.reference is not None:
        reference = build_reference(recipe.reference, tokenizer, device_spec=device_spec)
    else:
        reference = base_alone(policy) if policy.has_adapter else policy.frozen_copy()
    for role, model in {"policy": policy, "reference": reference}.items():
        check_lengths(model.base.config, role=role, max_prompt_tokens=longest, max_response_tokens=0)
    fingerprint = inputs_fingerprint(rows, tokenizer, _unsaved_models(policy, reference))
    narrow_frozen(reference, beside=[policy.model])
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
