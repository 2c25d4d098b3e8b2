"""`proximo reward`: from the recipe to a running task. Not the steps (reward_task.py)."""

from collections.abc import Sequence

from proximo.config.recipes import RewardRecipe
from proximo.data.preferences import PairOptions, PreferencePair, load_preference_pairs
from proximo.errors import ConfigError
from proximo.models.dropout import disable_dropout
from proximo.models.positions import check_lengths
from proximo.models.scalar import HeadStart
from proximo.trainers.build import build_scalar_model, build_tokenizer, prepare_place
from proximo.trainers.loop import run_task
from proximo.trainers.options import RunOptions
from proximo.trainers.reward_task import RewardTask, pair_sequences
from proximo.trainers.rows import read_split, token_cache
from proximo.trainers.sections import check_optimizer
from proximo.trainers.unchanged import inputs_fingerprint


def run_reward(recipe: RewardRecipe, options: RunOptions) -> int:
    """Train the reward model of the recipe; returns the exit status."""
    return run_task(lambda: build_task(recipe), recipe, recipe.run, options)


def build_task(recipe: RewardRecipe) -> RewardTask:
    """Data first, then the model: a mistake in a file costs no loading."""
    if recipe.model.start != "path":
        raise ConfigError(f"model.start is {recipe.model.start}, but a reward model starts from a path or a config")
    place, cache = prepare_place(recipe.run), token_cache(recipe.run)
    check_optimizer(recipe.reward.optimizer, place.device)
    rows = read_split(recipe.data, seed=recipe.run.seed)
    tokenizer = build_tokenizer(recipe.tokenizer, model_path=recipe.model.path, revision=recipe.model.revision)
    data = recipe.data
    how = PairOptions(
        form=data.form,
        min_response_words=data.min_response_words,
        max_tokens=data.max_tokens,
        too_long=data.too_long,
        as_messages=data.as_messages,
        system=data.system,
    )
    pairs, report = load_preference_pairs(rows.training, tokenizer, how, cache=cache)
    held_out: list[PreferencePair] = []
    if rows.held_out:
        held_out, _ = load_preference_pairs(rows.held_out, tokenizer, how, cache=cache)
    model = build_scalar_model(recipe.model, tokenizer, fresh_head=HeadStart.NORMAL, place=place, role="reward")
    longest = max(len(sequence) for pair in [*pairs, *held_out] for sequence in pair_sequences(pair))
    check_lengths(model.base.config, role="reward", max_prompt_tokens=longest, max_response_tokens=0)
    if not recipe.reward.dropout:
        disable_dropout(model.model)
    return RewardTask(
        model,
        tokenizer,
        pairs,
        held_out,
        config=recipe.reward,
        seed=recipe.run.seed,
        inputs_fingerprint=inputs_fingerprint(rows, tokenizer, {"base": model.model} if model.has_adapter else {}),
        notes=(f"data: {rows.description}", f"training pairs: {report}", *_unused_margins(recipe, pairs), *cache.notes),
    )


def _unused_margins(recipe: RewardRecipe, pairs: Sequence[PreferencePair]) -> list[str]:
    """A note where rows have margins that the loss has no place for."""
    count = sum(pair.margin is not None for pair in pairs)
    if not count or recipe.reward.loss == "bradley_terry":
        return []
    return [f"the margins of {count:,} pairs are not used: only loss bradley_terry has a place for them"]
