"""Builds the task of `proximo dpo` from its recipe. The steps: task.py."""

from itertools import chain

from proximo.counts import count_of
from proximo.run.build.conversion import check_optimizer
from proximo.run.build.data import evaluation_notes, read_split, token_cache
from proximo.run.build.models import build_tokenizer, check_readers, prepare_device
from proximo.supervised.dpo.recipe import DPORecipe
from proximo.supervised.dpo.task import DPOTask
from proximo.supervised.pair_data import SplitPairs, load_pairs
from proximo.supervised.reference_models import build_policy_and_reference, check_prompts
from proximo.supervised.task import TaskInputs


def build_task(recipe: DPORecipe) -> DPOTask:
    """Load data, then models, so that a bad data file fails before any weights are loaded."""
    device_spec, cache = prepare_device(recipe.run), token_cache(recipe.run)
    check_optimizer(recipe.dpo.optimizer, device_spec.device)
    rows = read_split(recipe.data, seed=recipe.run.seed)
    tokenizer = build_tokenizer(recipe.tokenizer, model_path=recipe.model.path, revision=recipe.model.revision)
    check_readers(recipe.tokenizer, tokenizer, {"policy": recipe.model, "reference": recipe.reference})
    pairs = load_pairs(recipe.data, rows, tokenizer, learned="responses", cache=cache)
    check_prompts(chain(pairs.training, pairs.held_out), "pairs")
    models = build_policy_and_reference(recipe, tokenizer, rows, longest=pairs.longest, device_spec=device_spec)
    inputs = TaskInputs(
        model=models.policy,
        tokenizer=tokenizer,
        examples=pairs.training,
        held_out=pairs.held_out,
        config=recipe.dpo,
        seed=recipe.run.seed,
        fingerprint=models.fingerprint,
        notes=(
            *(f"data: {rows.description}", f"training pairs: {pairs.report}", *_unused_margins(pairs)),
            *(*evaluation_notes(recipe.data, pairs.held_out_report), *cache.notes),
        ),
    )
    return DPOTask(inputs, reference=models.reference)


def _unused_margins(pairs: SplitPairs) -> list[str]:
    """A note if pairs have margins, which DPO's loss ignores."""
    count = pairs.num_margins
    return [f"the margins of {count_of(count, 'pair')} are not used: DPO's loss has no place for them"] if count else []
