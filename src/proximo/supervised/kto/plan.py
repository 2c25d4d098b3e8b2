"""Plans a stage of KTO."""

from proximo.plan.cost_model import likelihood_loss
from proximo.plan.stages import StageContext, StageCosts
from proximo.supervised.kto.recipe import KTORecipe
from proximo.supervised.plan import plan_update, weightless_policy_and_reference


def plan(recipe: KTORecipe, context: StageContext) -> StageCosts:
    """Models and costs of a step.

    Before the update the reference reads all answers. With `reference_point: kl`, both models also read every prompt
    with the answer to another one.
    """
    policy, models = weightless_policy_and_reference(recipe, context)
    mismatched = int(recipe.kto.reference_point == "kl")
    return plan_update(
        models,
        recipe.kto,
        likelihood_loss(policy),
        max_tokens=recipe.data.max_tokens,
        sequences_per_row=1,
        context=context,
        readings={"reference": 1 + mismatched, **({"policy": 1} if mismatched else {})},
    )
