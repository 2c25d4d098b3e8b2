"""Plans a stage of supervised fine-tuning."""

from proximo.models.fake_tensor_profiler import building
from proximo.plan.cost_model import likelihood_loss
from proximo.plan.stages import StageContext, StageCosts
from proximo.plan.weightless_models import language_model
from proximo.supervised.plan import plan_update
from proximo.supervised.sft.recipe import SFTRecipe


def plan(recipe: SFTRecipe, context: StageContext) -> StageCosts:
    """Models and costs of a step: one model, trained on single examples."""
    config = context.configs.sized(recipe.model, context.configs.num_tokens(recipe.tokenizer, recipe.model))
    with building():
        model = language_model(config, recipe.model, precision=context.precision, dropout=recipe.sft.dropout)
    return plan_update(
        {"policy": model},
        recipe.sft,
        likelihood_loss(model),
        max_tokens=recipe.data.max_tokens,
        sequences_per_row=1,
        context=context,
    )
