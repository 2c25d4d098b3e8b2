"""What of a recipe no plan can say, and what a plan leaves out. Not whether the recipe can run."""

from collections.abc import Iterator

from proximo.config.recipes import DPORecipe, PPORecipe, RewardRecipe, SFTRecipe
from proximo.config.run import ModelConfig, OptimizerConfig, ScalarModelConfig
from proximo.errors import ConfigError

Stage = SFTRecipe | RewardRecipe | DPORecipe | PPORecipe


def check_plannable(recipe: Stage) -> None:
    """Raises ConfigError for weights of few bits."""
    for key, model in _models(recipe).items():
        if model.quantisation != "none":
            raise ConfigError(
                f"no plan for {key}.quantisation {model.quantisation}: what bitsandbytes holds and expands in its "
                f"products cannot be rehearsed without weights; plan with {key}.quantisation=none for what the same "
                "run takes with float32 weights"
            )


def notes_on(recipe: Stage) -> Iterator[str]:
    """One sentence for each option that the numbers of the plan leave out."""
    if recipe.run.compile != "none":
        yield f"run.compile {recipe.run.compile} is left out: passes are counted as they are without it"
    if any(optimizer.kind == "adamw_paged_8bit" for optimizer in _optimizers(recipe)):
        yield "the moments of adamw_paged_8bit are counted, though CUDA may move them to the host"
    if isinstance(recipe, PPORecipe):
        if recipe.ppo.critic_warmup_steps and recipe.value.init_from == "trunk":
            yield "the critic's warm-up is left out: there the value head learns alone, which takes less"
        if any(source.kind == "model" and source.tokenizer is not None for source in recipe.reward):
            yield "a reward model with a tokenizer of its own is taken to read as many tokens as the policy"


def _models(recipe: Stage) -> dict[str, ModelConfig | ScalarModelConfig]:
    if not isinstance(recipe, PPORecipe):
        return {"model": recipe.model}
    value = {"value": recipe.value} if recipe.ppo.uses_critic else {}
    return {"policy": recipe.policy, **value}


def _optimizers(recipe: Stage) -> list[OptimizerConfig]:
    match recipe:
        case SFTRecipe():
            return [recipe.sft.optimizer]
        case RewardRecipe():
            return [recipe.reward.optimizer]
        case DPORecipe():
            return [recipe.dpo.optimizer]
        case PPORecipe():
            own = [recipe.ppo.value_optimizer] if recipe.ppo.uses_critic else []
            return own if recipe.ppo.policy_optimizer is None else [*own, recipe.ppo.policy_optimizer]
