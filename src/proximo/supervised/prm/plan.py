"""Plans a stage of process reward model training."""

from proximo.models.fake_tensor_profiler import building
from proximo.plan.cost_model import score_loss
from proximo.plan.stages import StageContext, StageCosts
from proximo.plan.weightless_models import scalar_model
from proximo.supervised.plan import plan_update
from proximo.supervised.prm.recipe import PRMRecipe


def plan(recipe: PRMRecipe, context: StageContext) -> StageCosts:
    """Models and costs of a step: one model, trained on single solutions."""
    config = context.configs.sized(recipe.model, context.configs.num_tokens(recipe.tokenizer, recipe.model))
    with building():
        model = scalar_model(config, recipe.model, precision=context.precision, dropout=recipe.prm.dropout)
    return plan_update(
        {"reward": model},
        recipe.prm,
        score_loss(model),
        max_tokens=recipe.data.max_tokens,
        sequences_per_row=1,
        context=context,
    )
