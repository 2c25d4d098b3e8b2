"""Plans the update of a supervised trainer: the cost of its passes, computed without weights."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from proximo.models.bf16_storage import narrow_frozen
from proximo.models.language import LanguageModel
from proximo.models.packing import PackedResponses
from proximo.plan.cost_model import (
    Batches,
    Model,
    StepCost,
    TrainingPass,
    inference_cost,
    likelihood_loss,
    sequential_cost,
    training_cost,
)
from proximo.plan.fake_tensor_profiler import PassProfiler, building, to_fake_tensors
from proximo.plan.profiling import StageContext, StageCosts, truncated_lengths
from proximo.plan.weightless_models import language_model, make_reference
from proximo.supervised.recipes import ReferenceRecipe, SupervisedConfig, SupervisedRecipe


def plan_update(
    models: Mapping[str, Model],
    config: SupervisedConfig,
    loss: Callable[[PassProfiler, PackedResponses], Tensor],
    *,
    max_tokens: int,
    sequences_per_row: int,
    context: StageContext,
    readings: Mapping[str, int] | None = None,
) -> StageCosts:
    """Costs of one update, on a rank. The first model is trained.

    `sequences_per_row`: 2 for preference pairs, else 1. `readings`: role -> how often its model reads as many rows
    before the update; None for once, by each model that is not trained.
    """
    to_fake_tensors(*(model.model for model in models.values()))
    layout = context.lay_out(models, lambda role: "reference" if role == "reference" else "model")
    lengths = truncated_lengths(models, prompt=1, response=max_tokens - 1)
    count, budget = config.rows_per_update, config.tokens_per_microbatch
    optimizer = config.optimizer
    update = Batches.of(
        lengths, count, token_budget=budget, sequences_per_row=sequences_per_row, num_ranks=context.ranks.num
    )
    (trained, learner), *others = models.items()
    readings = dict.fromkeys((role for role, _ in others), 1) if readings is None else readings
    tokens = sequences_per_row * context.ranks.share(count) * lengths.total
    training_pass = TrainingPass(loss=loss, batches=update, tokens=tokens)
    reduced = layout.reduced([learner.model], rounds=len(update.groups), in_backward=optimizer.in_backward)
    costs: dict[str, StepCost] = {
        f"{role}_logprobs": sequential_cost([inference_cost(models[role], update)] * times)
        for role, times in readings.items()
    }
    costs["train"] = training_cost([learner.model], [training_pass], in_backward=optimizer.in_backward, reduced=reduced)
    return StageCosts(
        models=models,
        optimized={trained: ([learner.model], optimizer)},
        costs=costs,
        update=update,
        token_budget=budget,
        layout=layout,
    )


def _policy_and_reference(recipe: ReferenceRecipe, context: StageContext) -> tuple[LanguageModel, dict[str, Model]]:
    """The policy, and both models by role, as reference.py builds them, but without weights."""
    configs = context.configs
    num_tokens = configs.num_tokens(recipe.tokenizer, recipe.model)
    with building():
        policy = language_model(configs.sized(recipe.model, num_tokens), recipe.model, precision=context.precision)
        reference = make_reference(recipe.reference, policy, configs, num_tokens)
        narrow_frozen(reference, beside=[policy.model])
    return policy, {"policy": policy, "reference": reference}


def plan_one_model(
    recipe: SupervisedRecipe,
    context: StageContext,
    *,
    role: str,
    make: Callable[..., Any],
    loss: Callable[[Any], Callable[[PassProfiler, PackedResponses], Tensor]],
    dropout: bool,
) -> StageCosts:
    """Models and costs of a step that trains one model.

    `make`: `language_model` or `scalar_model`. `loss`: makes the loss of that model.
    """
    config = context.configs.sized(recipe.model, context.configs.num_tokens(recipe.tokenizer, recipe.model))
    with building():
        model = make(config, recipe.model, precision=context.precision, dropout=dropout)
    return plan_update(
        {role: model},
        recipe.training,
        loss(model),
        max_tokens=recipe.data.max_tokens,
        sequences_per_row=recipe.sequences_per_row,
        context=context,
    )


def plan_with_reference(
    recipe: ReferenceRecipe, context: StageContext, *, readings: Mapping[str, int] | None = None
) -> StageCosts:
    """Models and costs of a step that trains a policy beside its reference. `readings`: see `plan_update`."""
    policy, models = _policy_and_reference(recipe, context)
    return plan_update(
        models,
        recipe.training,
        likelihood_loss(policy),
        max_tokens=recipe.data.max_tokens,
        sequences_per_row=recipe.sequences_per_row,
        context=context,
        readings=readings,
    )
