"""Builds the task of `proximo dpo` from its recipe. The steps: task.py."""

from collections.abc import Sequence

from torch import nn

from proximo.data.preferences import PreferencePair
from proximo.errors import DataError
from proximo.models.context_length import check_lengths
from proximo.models.dropout import disable_dropout
from proximo.models.language import LanguageModel
from proximo.models.narrowing import narrow_frozen
from proximo.models.sharing.shared_base import base_alone
from proximo.run.build.conversion import check_optimizer
from proximo.run.build.data import read_split, token_cache
from proximo.run.build.models import (
    build_language_model,
    build_reference,
    build_tokenizer,
    check_readers,
    prepare_device,
)
from proximo.run.build.sharding import shard_model
from proximo.run.resume_fingerprint import inputs_fingerprint
from proximo.supervised.dpo.recipe import DPORecipe
from proximo.supervised.dpo.task import DPOTask
from proximo.supervised.pair_data import SplitPairs, load_pairs
from proximo.supervised.task import TaskInputs


def build_task(recipe: DPORecipe) -> DPOTask:
    """Load data, then models, so that a bad data file fails before any weights are loaded."""
    device_spec, cache = prepare_device(recipe.run), token_cache(recipe.run)
    check_optimizer(recipe.dpo.optimizer, device_spec.device)
    rows = read_split(recipe.data, seed=recipe.run.seed)
    tokenizer = build_tokenizer(recipe.tokenizer, model_path=recipe.model.path, revision=recipe.model.revision)
    check_readers(recipe.tokenizer, tokenizer, {"policy": recipe.model, "reference": recipe.reference})
    pairs = load_pairs(recipe.data, rows, tokenizer, cache=cache)
    _check_prompts(pairs.all)
    policy = build_language_model(recipe.model, tokenizer, device_spec=device_spec, role="policy")
    disable_dropout(policy.model)
    if recipe.reference is not None:
        reference = build_reference(recipe.reference, tokenizer, device_spec=device_spec)
    else:
        reference = base_alone(policy) if policy.has_adapter else policy.frozen_copy()
    for role, model in {"policy": policy, "reference": reference}.items():
        check_lengths(model.base.config, role=role, max_prompt_tokens=pairs.longest, max_response_tokens=0)
    fingerprint = inputs_fingerprint(rows, tokenizer, _unsaved_models(policy, reference))
    narrow_frozen(reference, beside=[policy.model])
    shard_model(policy, recipe.devices, role="model", beside=[reference.model])
    shard_model(reference, recipe.devices, role="reference", beside=[policy.model])
    inputs = TaskInputs(
        model=policy,
        tokenizer=tokenizer,
        examples=pairs.training,
        held_out=pairs.held_out,
        config=recipe.dpo,
        seed=recipe.run.seed,
        fingerprint=fingerprint,
        notes=(f"data: {rows.description}", f"training pairs: {pairs.report}", *_unused_margins(pairs), *cache.notes),
    )
    return DPOTask(inputs, reference=reference)


def _unsaved_models(policy: LanguageModel, reference: LanguageModel) -> dict[str, nn.Module]:
    """The model that no checkpoint of this run holds: it is read from its own folder at every start."""
    return {"policy_base": policy.model} if policy.has_adapter else {"reference": reference.model}


def _check_prompts(pairs: Sequence[PreferencePair]) -> None:
    """Raises DataError if a pair has an empty prompt: its first response token would have no preceding token."""
    no_prompt = [pair.id for pair in pairs if not pair.prompt_token_ids]
    if no_prompt:
        raise DataError(
            f"{len(no_prompt):,} of {len(pairs):,} pairs have no prompt, the first of them {no_prompt[0]}, and the "
            "tokenizer puts no BOS before the answer, so that nothing predicts its first token: give the rows a "
            "prompt, or take a tokenizer with a BOS"
        )


def _unused_margins(pairs: SplitPairs) -> list[str]:
    """A note if pairs have margins, which DPO's loss ignores."""
    count = pairs.num_margins
    return [f"the margins of {count:,} pairs are not used: DPO's loss has no place for them"] if count else []
