"""Plans a stage of DPO."""

from proximo.plan.cost_model import likelihood_loss
from proximo.plan.stages import StageContext, StageCosts
from proximo.supervised.dpo.recipe import DPORecipe
from proximo.supervised.plan import plan_update, weightless_policy_and_reference


def plan(recipe: DPORecipe, context: StageContext) -> StageCosts:
    """Models and costs of a step. The reference computes log-probs of all pairs before the policy is updated."""
    policy, models = weightless_policy_and_reference(recipe, context)
    return plan_update(
        models,
        recipe.dpo,
        likelihood_loss(policy),
        max_tokens=recipe.data.max_tokens,
        sequences_per_row=2,
        context=context,
    )
