"""The models and the passes of a PPO step, as its graph of calls names them. Not the step."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

from transformers import PreTrainedConfig

from proximo.config.ppo import ModelRewardConfig
from proximo.config.recipes import PPORecipe
from proximo.config.run import ModelConfig, ScalarModelConfig
from proximo.models.language import LanguageModel
from proximo.models.placement import Precision
from proximo.models.scalar import ScalarModel
from proximo.trainers.calls import step_graph
from proximo.trainers.planning import passes
from proximo.trainers.planning.passes import Batches, Lengths, Model, StepCost
from proximo.trainers.planning.roles import Origins, language_model, scalar_model


def ppo_models(recipe: PPORecipe, origins: Origins, *, precision: Precision) -> dict[str, Model]:
    """Role -> model, as ppo_run.py builds them; reward models by their names."""
    num_tokens = origins.num_tokens(recipe.tokenizer, recipe.policy)
    own = origins.sized(recipe.policy, num_tokens)
    policy = language_model(own, recipe.policy, precision=precision)
    models: dict[str, Model] = {"policy": policy}
    if recipe.ppo.kl.place != "none" and not policy.has_adapter:
        config = own if recipe.reference is None else origins.sized(recipe.reference, num_tokens)
        models["reference"] = _frozen(language_model(config, _PLAIN, precision=precision))
    if recipe.ppo.average_decay is not None:
        models["average"] = _frozen(language_model(own, _PLAIN, precision=precision))
    if recipe.ppo.uses_critic:
        models["value"] = scalar_model(_value_config(recipe, origins, policy), recipe.value, precision=precision)
    for source in recipe.reward:
        if isinstance(source, ModelRewardConfig):
            config = origins.config(source.path, source.revision)
            models[source.name] = _frozen(scalar_model(config, ScalarModelConfig(), precision=precision))
    return models


def _frozen(model: ScalarModel | LanguageModel) -> Model:
    model.model.requires_grad_(False)
    return model


_PLAIN = ModelConfig(config={"model_type": "any"})
"""No adapter, nothing frozen, no checkpointing."""


def _value_config(recipe: PPORecipe, origins: Origins, policy: LanguageModel) -> PreTrainedConfig:
    match recipe.value.start:
        case "policy":
            return policy.base.config
        case "reward":
            scorer = next(source for source in recipe.reward if isinstance(source, ModelRewardConfig))
            return origins.config(scorer.path, scorer.revision)
        case "path":
            return origins.sized(recipe.value, origins.num_tokens(recipe.tokenizer, recipe.policy))


def ppo_costs(recipe: PPORecipe, models: Mapping[str, Model], lengths: Lengths) -> dict[str, StepCost]:
    """What each call of a step costs, by its name, in the order of the graph."""
    config = recipe.ppo
    serve = recipe.run.precision == "float32" and not config.rollout.reshapes_distribution
    calls = step_graph(config, sampled_serve=serve).calls
    costs = _costs_of_calls(recipe, models, lengths)
    return {call.name: costs[call.name]() for call in calls if call.name in costs}


def _costs_of_calls(
    recipe: PPORecipe, models: Mapping[str, Model], lengths: Lengths
) -> dict[str, Callable[[], StepCost]]:
    config, policy, value = recipe.ppo, models["policy"], models.get("value")
    assert isinstance(policy, LanguageModel)
    reference = models.get("reference", policy)
    assert isinstance(reference, LanguageModel)
    budget = config.tokens_per_microbatch
    whole = Batches.of(lengths, config.responses_per_step, token_budget=budget)
    update = Batches.of(lengths, config.responses_per_update, token_budget=budget)
    trained = config.epochs_per_step * config.responses_per_step * lengths.total
    both = policy if config.kl.measure == "full" and config.kl.place == "reward" else None
    judges = [models[source.name] for source in recipe.reward if isinstance(source, ModelRewardConfig)]
    costs: dict[str, Callable[[], StepCost]] = {
        "generate": lambda: passes.rollout(policy, lengths, config),
        "policy_logprobs": lambda: passes.reading(policy, whole),
        "reference_logprobs": lambda: _as_reference(policy, lambda: passes.reading(reference, whole, also=both)),
        "train_policy": lambda: passes.training(
            policy, passes.policy_loss(policy, reference, config), update, tokens=trained
        ),
    }
    if judges:
        costs["score"] = lambda: _one_after_the_other([passes.reading(judge, whole) for judge in judges])
    if isinstance(value, ScalarModel):
        costs["values"] = lambda: passes.reading(value, whole)
        costs["train_value"] = lambda: passes.training(value, passes.score_loss(value), update, tokens=trained)
    return costs


def _as_reference(policy: LanguageModel, run: Callable[[], StepCost]) -> StepCost:
    """An adapter is off meanwhile."""
    with policy.reference_view() if policy.has_adapter else nullcontext():
        return run()


def _one_after_the_other(costs: Sequence[StepCost]) -> StepCost:
    """The memory of the one that needs most, the work of all."""
    largest = max(costs, key=lambda cost: sum(cost.parts.values()))
    return replace(largest, flops=sum(c.flops for c in costs), tokens=sum(c.tokens for c in costs))
