"""The plan of the training of a reward model."""

from proximo.models.fake_tensor_profiler import building
from proximo.plan.cost_model import score_loss
from proximo.plan.stages import StageContext, StageCosts
from proximo.plan.weightless_models import scalar_model
from proximo.supervised.plan import plan_update
from proximo.supervised.reward.recipe import RewardRecipe


def plan(recipe: RewardRecipe, context: StageContext) -> StageCosts:
    """One model, which learns from pairs."""
    config = context.origins.sized(recipe.model, context.origins.num_tokens(recipe.tokenizer, recipe.model))
    with building():
        model = scalar_model(config, recipe.model, precision=context.precision, dropout=recipe.reward.dropout)
    return plan_update(
        {"reward": model}, recipe.reward, score_loss(model), max_tokens=recipe.data.max_tokens, sequences_each=2
    )
