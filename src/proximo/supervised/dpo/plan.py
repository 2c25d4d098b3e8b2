"""Plans a stage of DPO."""

from proximo.models.fake_tensor_profiler import building
from proximo.models.narrowing import narrow_frozen
from proximo.plan.cost_model import likelihood_loss
from proximo.plan.stages import StageContext, StageCosts
from proximo.plan.weightless_models import language_model, make_reference
from proximo.supervised.dpo.recipe import DPORecipe
from proximo.supervised.plan import plan_update


def plan(recipe: DPORecipe, context: StageContext) -> StageCosts:
    """Models and costs of a step. The reference computes log-probs of all pairs before the policy is updated."""
    configs = context.configs
    num_tokens = configs.num_tokens(recipe.tokenizer, recipe.model)
    with building():
        policy = language_model(configs.sized(recipe.model, num_tokens), recipe.model, precision=context.precision)
        reference = make_reference(recipe.reference, policy, configs, num_tokens)
        narrow_frozen(reference, beside=[policy.model])
    models = {"policy": policy, "reference": reference}
    return plan_update(
        models,
        recipe.dpo,
        likelihood_loss(policy),
        max_tokens=recipe.data.max_tokens,
        sequences_per_row=2,
        context=context,
    )
