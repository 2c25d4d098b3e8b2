"""Registers reward model training as a trainer.

Heavy imports are inside the methods, so that the command line starts fast.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

from proximo.counts import count_of
from proximo.trainer_kinds import TrainerKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from proximo.metrics.trainer_metrics import TrainerMetrics
    from proximo.plan.stages import StageContext, StageCosts
    from proximo.supervised.reward.recipe import RewardRecipe
    from proximo.supervised.reward.task import RewardTask


class RewardKind(TrainerKind["RewardRecipe"]):
    name = "reward"
    help = """Train a reward model on pairs of a chosen and a rejected answer.

    \b
    proximo reward reward.yaml --dry-run
    proximo reward reward.yaml model.path=runs/sft-model reward.score_centring=0.01
    proximo reward reward.yaml --resume

    docs/configuration.md lists every key, docs/data.md the forms of preference data.
    """
    title = "Reward model"
    short_title = "Reward model"
    task = "training of a reward model"
    card_settings = (
        "reward.num_epochs",
        "reward.pairs_per_step",
        "reward.loss",
        "reward.score_centring",
        "reward.optimizer.learning_rate",
        "data.max_tokens",
    )
    card_limits = (
        "It compares answers like those that it was trained on. On others its score means little, and a policy that is "
        "trained against it will find them. Only differences of scores mean anything."
    )

    @property
    def schema(self) -> "type[RewardRecipe]":
        from proximo.supervised.reward.recipe import RewardRecipe

        return RewardRecipe

    @property
    def metrics(self) -> "TrainerMetrics":
        from proximo.supervised.reward.metrics import REWARD_METRICS

        return REWARD_METRICS

    def recognises(self, tree: "Mapping[str, Any]") -> bool:
        """The rewards of a recipe of PPO, under the same key, are a list."""
        return super().recognises(tree) and "ppo" not in tree and not isinstance(tree["reward"], (list, tuple))

    def build(self, recipe: "RewardRecipe") -> "RewardTask":
        from proximo.supervised.reward.build import build_task

        return build_task(recipe)

    def dry_run(self, recipe: "RewardRecipe") -> "Iterator[tuple[str, str]]":
        from proximo.data.formats.row_formats import preference_exchanges
        from proximo.run.dry_run import data_lines, describe_model, epoch_lines, trained_part

        yield "model", f"{describe_model(recipe.model)} with a score head, {trained_part(recipe.model)}"
        yield from data_lines(recipe, recipe.data, partial(preference_exchanges, form=recipe.data.form))
        batch = f"{count_of(recipe.reward.pairs_per_step, 'pair')} (two sequences each)"
        yield from epoch_lines(batch, recipe.reward.num_epochs, "pairs", recipe.data.max_tokens)

    def plan(self, recipe: "RewardRecipe", context: "StageContext") -> "StageCosts":
        from proximo.supervised.reward.plan import plan

        return plan(recipe, context)


REWARD = RewardKind()
