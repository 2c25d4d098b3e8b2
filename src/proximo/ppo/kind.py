"""Registers PPO as a trainer. Heavy imports are inside the methods, so that the command line starts fast."""

from typing import TYPE_CHECKING, Any

from proximo.trainer_kinds import TrainerKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from proximo.metrics.shared_declarations import TrainerMetrics
    from proximo.plan.stages import StageContext, StageCosts
    from proximo.ppo.recipe import PPORecipe
    from proximo.ppo.task import PPOTask


class PPOKind(TrainerKind["PPORecipe"]):
    name = "ppo"
    help = """Train a policy with PPO, or with group-wise advantages, against a reward.

    The reward is a reward model, a Python function, or a weighted sum of several.

    \b
    proximo ppo ppo.yaml --dry-run            responses, updates and tokens of a step
    proximo ppo ppo.yaml ppo.kl.coefficient=0.1 run.folder=runs/kl-0.1
    proximo ppo ppo.yaml --resume             after an interruption: the same bits

    docs/configuration.md lists every key, docs/ppo.md says what each step does.
    """
    title = "PPO"
    short_title = "PPO"
    task = "PPO"
    card_settings = (
        "ppo.num_steps",
        "ppo.prompts_per_step",
        "ppo.responses_per_prompt",
        "ppo.epochs_per_step",
        "ppo.advantage.kind",
        "ppo.policy_loss.objective.kind",
        "ppo.kl.kind",
        "ppo.kl.coefficient",
        "ppo.rollout.temperature",
        "ppo.rollout.max_new_tokens",
        "ppo.policy_optimizer.learning_rate",
    )

    @property
    def schema(self) -> "type[PPORecipe]":
        from proximo.ppo.recipe import PPORecipe

        return PPORecipe

    @property
    def metrics(self) -> "TrainerMetrics":
        from proximo.ppo.metrics.declared import PPO_METRICS

        return PPO_METRICS

    def recognises(self, tree: "Mapping[str, Any]") -> bool:
        has_reward = isinstance(tree.get("reward"), (list, tuple)) or "environment" in tree
        return super().recognises(tree) or ("model" in tree and has_reward)

    def build(self, recipe: "PPORecipe") -> "PPOTask":
        from proximo.ppo.from_recipe import build_task

        return build_task(recipe)

    def dry_run(self, recipe: "PPORecipe") -> "Iterator[tuple[str, str]]":
        from proximo.ppo.dry_run import dry_run

        return dry_run(recipe)

    def plan(self, recipe: "PPORecipe", context: "StageContext") -> "StageCosts":
        from proximo.ppo.plan import plan_ppo

        return plan_ppo(recipe, context)

    def ineffective_keys(self, recipe: "PPORecipe", prefix: str) -> "Iterator[str]":
        from proximo.ppo.dry_run import ineffective_keys

        return ineffective_keys(recipe, prefix)


PPO = PPOKind()
