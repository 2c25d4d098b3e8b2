"""Builds the critic of a PPO run from the source that `value.init_from` names."""

from transformers import PreTrainedTokenizerBase

from proximo.config.rewards.sources import ModelRewardConfig
from proximo.config.run import ScalarModelConfig
from proximo.models.language import LanguageModel
from proximo.models.pretrained.folders import refuse_second_adapter
from proximo.models.pretrained.sources import adapter_folder, adapter_or_folder
from proximo.models.scalar import HeadStart, ScalarModel, scalar_from_language_model
from proximo.models.sharing import scalar_from_adapter, value_on_base
from proximo.ppo.recipe import PPORecipe
from proximo.run.make.models import (
    DeviceSpec,
    build_scalar_model,
    build_value_on_trunk,
    finish_scalar_model,
    lora_options,
    model_source,
)


def build_value(
    recipe: PPORecipe, policy: LanguageModel, tokenizer: PreTrainedTokenizerBase, *, device_spec: DeviceSpec
) -> ScalarModel | None:
    """The critic: on the policy's backbone or a copy of it, from the reward model with its head, or from a checkpoint.

    None if the advantage estimator needs no critic. Raises ModelError if it cannot be built.
    """
    config, device_spec = recipe.value, device_spec.on(recipe.value.device)
    if not recipe.ppo.uses_critic:
        return None
    if config.init_from == "trunk":
        return build_value_on_trunk(config, policy, device_spec=device_spec)
    if config.init_from == "policy":
        return _from_policy(recipe, policy, device_spec=device_spec)
    if config.init_from == "reward":
        return _from_reward(recipe, policy, tokenizer, device_spec=device_spec)
    return build_scalar_model(config, tokenizer, fresh_head=HeadStart.ZERO, device_spec=device_spec)


def value_reader(recipe: PPORecipe) -> ScalarModelConfig | ModelRewardConfig | None:
    """The section of the model whose embedding the critic uses for the policy's ids; None if it is the policy's own."""
    config = recipe.value
    if not recipe.ppo.uses_critic or config.init_from in ("policy", "trunk"):
        return None
    return _scorer(recipe) if config.init_from == "reward" else config


def _scorer(recipe: PPORecipe) -> ModelRewardConfig:
    return next(source for source in recipe.reward if isinstance(source, ModelRewardConfig))


def _from_policy(recipe: PPORecipe, policy: LanguageModel, *, device_spec: DeviceSpec) -> ScalarModel:
    config = recipe.value
    if config.lora is not None:
        source = model_source(recipe.model, seed=device_spec.seed)
        refuse_second_adapter(adapter_folder(source), source.name)
    if config.lora is not None and policy.has_adapter:
        model = value_on_base(
            policy, lora_options(config.lora, seed=device_spec.seed), HeadStart.ZERO, seed=device_spec.seed
        )
        return finish_scalar_model(model, config.model_copy(update={"lora": None}), device_spec=device_spec)
    model = scalar_from_language_model(policy, HeadStart.ZERO, seed=device_spec.seed)
    if model.device != device_spec.loading_device:
        model.model.to(device_spec.loading_device)
    return finish_scalar_model(model, config, device_spec=device_spec)


def _from_reward(
    recipe: PPORecipe, policy: LanguageModel, tokenizer: PreTrainedTokenizerBase, *, device_spec: DeviceSpec
) -> ScalarModel:
    config = recipe.value
    scorer = _scorer(recipe)
    path, revision = scorer.path, scorer.revision
    if scorer.share_base:
        return finish_scalar_model(
            scalar_from_adapter(policy, adapter_or_folder(path, revision), role="value"),
            config,
            device_spec=device_spec,
        )
    start = config.model_copy(update={"init_from": "path", "path": path, "revision": revision})
    return build_scalar_model(start, tokenizer, fresh_head=None, device_spec=device_spec)
