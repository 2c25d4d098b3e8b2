"""Where the critic of a PPO run starts, as the recipe says. Not the models themselves: see build/models.py
and models/.
"""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from proximo.config.rewards.sources import ModelRewardConfig
from proximo.config.run import ScalarModelConfig
from proximo.models.language import LanguageModel
from proximo.models.pretrained.sources import ModelSource
from proximo.models.scalar import HeadStart, ScalarModel, scalar_from_language_model
from proximo.models.sharing.shared_base import scalar_from_adapter, value_on_base
from proximo.ppo.recipe import PPORecipe
from proximo.run.build.models import (
    Place,
    build_scalar_model,
    build_value_on_trunk,
    finish_scalar_model,
    lora_options,
    refuse_second_adapter,
)


def build_value(
    recipe: PPORecipe, policy: LanguageModel, tokenizer: PreTrainedTokenizerBase, *, place: Place
) -> ScalarModel | None:
    """On the policy's backbone or a copy, from the reward model with its head, or from a checkpoint.

    None where nothing needs a critic. Raises ModelError where it cannot be made.
    """
    config, place = recipe.value, place.on(recipe.value.device)
    if not recipe.ppo.uses_critic:
        return None
    if config.init_from == "trunk":
        return build_value_on_trunk(config, policy, place=place)
    if config.init_from == "policy":
        return _from_policy(recipe, policy, place=place)
    if config.init_from == "reward":
        return _from_reward(recipe, policy, tokenizer, place=place)
    return build_scalar_model(config, tokenizer, fresh_head=HeadStart.ZERO, place=place)


def value_reader(recipe: PPORecipe) -> ScalarModelConfig | ModelRewardConfig | None:
    """Whose embedding reads the policy's ids for the critic, where that is not the policy's own."""
    config = recipe.value
    if not recipe.ppo.uses_critic or config.init_from in ("policy", "trunk"):
        return None
    return _scorer(recipe) if config.init_from == "reward" else config


def _scorer(recipe: PPORecipe) -> ModelRewardConfig:
    return next(source for source in recipe.reward if isinstance(source, ModelRewardConfig))


def _from_policy(recipe: PPORecipe, policy: LanguageModel, *, place: Place) -> ScalarModel:
    config = recipe.value
    if config.lora is not None:
        refuse_second_adapter(ModelSource(path=recipe.policy.path, config=recipe.policy.config), role="value")
    if config.lora is not None and policy.has_adapter:
        model = value_on_base(policy, lora_options(config.lora, seed=place.seed), HeadStart.ZERO, seed=place.seed)
        return finish_scalar_model(model, config.model_copy(update={"lora": None}), place=place)
    model = scalar_from_language_model(policy, HeadStart.ZERO, seed=place.seed)
    if model.device != place.device:
        model.model.to(place.device)
    return finish_scalar_model(model, config, place=place)


def _from_reward(
    recipe: PPORecipe, policy: LanguageModel, tokenizer: PreTrainedTokenizerBase, *, place: Place
) -> ScalarModel:
    config = recipe.value
    scorer = _scorer(recipe)
    path, revision = scorer.path, scorer.revision
    if scorer.share_base:
        return finish_scalar_model(scalar_from_adapter(policy, Path(path), role="value"), config, place=place)
    start = config.model_copy(update={"init_from": "path", "path": path, "revision": revision})
    return build_scalar_model(start, tokenizer, fresh_head=None, place=place)
