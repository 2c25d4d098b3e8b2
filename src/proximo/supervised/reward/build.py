"""Builds the task of `proximo reward` from its recipe. The steps: task.py."""

from proximo.counts import count_of
from proximo.errors import ConfigError
from proximo.models.context_length import check_lengths
from proximo.models.dropout import disable_dropout
from proximo.models.scalar import HeadStart
from proximo.run.build.conversion import check_optimizer
from proximo.run.build.data import evaluation_notes, read_split, token_cache
from proximo.run.build.models import build_scalar_model, build_tokenizer, check_readers, prepare_device
from proximo.run.build.sharding import shard_model
from proximo.run.resume_fingerprint import inputs_fingerprint
from proximo.supervised.pair_data import SplitPairs, load_pairs
from proximo.supervised.reward.recipe import RewardRecipe
from proximo.supervised.reward.task import RewardTask
from proximo.supervised.task import TaskInputs


def build_task(recipe: RewardRecipe) -> RewardTask:
    """Load data, then the model, so that a bad data file fails before any weights are loaded."""
    if recipe.model.init_from != "path":
        raise ConfigError(
            f"model.init_from is {recipe.model.init_from}, but a reward model starts from a path or a config"
        )
    device_spec, cache = prepare_device(recipe.run), token_cache(recipe.run)
    check_optimizer(recipe.reward.optimizer, device_spec.device)
    rows = read_split(recipe.data, seed=recipe.run.seed)
    tokenizer = build_tokenizer(recipe.tokenizer, model_path=recipe.model.path, revision=recipe.model.revision)
    check_readers(recipe.tokenizer, tokenizer, {"reward": recipe.model})
    pairs = load_pairs(recipe.data, rows, tokenizer, learned="last", cache=cache)
    model = build_scalar_model(recipe.model, tokenizer, fresh_head=HeadStart.NORMAL, device_spec=device_spec)
    check_lengths(model.base.config, role="reward", max_prompt_tokens=pairs.longest, max_response_tokens=0)
    if not recipe.reward.dropout:
        disable_dropout(model.model)
    fingerprint = inputs_fingerprint(rows, tokenizer, {"base": model.model} if model.has_adapter else {})
    shard_model(model, recipe.devices, role="model")
    return RewardTask(
        TaskInputs(
            model=model,
            tokenizer=tokenizer,
            examples=pairs.training,
            held_out=pairs.held_out,
            config=recipe.reward,
            seed=recipe.run.seed,
            fingerprint=fingerprint,
            notes=(
                *(f"data: {rows.description}", f"training pairs: {pairs.report}"),
                *_unused_margins(recipe, pairs),
                *(*evaluation_notes(recipe.data, pairs.held_out_report), *cache.notes),
            ),
        )
    )


def _unused_margins(recipe: RewardRecipe, pairs: SplitPairs) -> list[str]:
    """A note if pairs have margins and the loss ignores them."""
    count = pairs.num_margins
    if not count or recipe.reward.loss == "bradley_terry":
        return []
    return [f"the margins of {count_of(count, 'pair')} are not used: only loss bradley_terry has a place for them"]
