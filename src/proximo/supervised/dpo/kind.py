"""Registers DPO as a trainer. Heavy imports are inside the methods, so that the command line starts fast."""

from functools import partial
from typing import TYPE_CHECKING

from proximo.counts import count_of
from proximo.trainer_kinds import TrainerKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from proximo.metrics.trainer_metrics import TrainerMetrics
    from proximo.plan.stages import StageContext, StageCosts
    from proximo.supervised.dpo.recipe import DPORecipe
    from proximo.supervised.dpo.task import DPOTask


class DPOKind(TrainerKind["DPORecipe"]):
    name = "dpo"
    help = """Train a policy on preference pairs directly, without a reward model and without sampling (DPO).

    \b
    proximo dpo dpo.yaml --dry-run
    proximo dpo dpo.yaml model.path=models/sft dpo.beta=0.05
    proximo dpo dpo.yaml --resume

    docs/configuration.md lists every key, docs/dpo.md says what it does and when to take it.
    """
    title = "DPO"
    short_title = "DPO"
    task = "direct preference optimisation (DPO)"
    card_settings = (
        "dpo.num_epochs",
        "dpo.pairs_per_step",
        "dpo.loss",
        "dpo.beta",
        "dpo.label_smoothing",
        "dpo.optimizer.learning_rate",
        "data.max_tokens",
    )
    card_limits = (
        "The loss sees only how much likelier the chosen answer is than the rejected one; both may have become less "
        "likely, in favour of answers that are in no pair."
    )

    @property
    def schema(self) -> "type[DPORecipe]":
        from proximo.supervised.dpo.recipe import DPORecipe

        return DPORecipe

    @property
    def metrics(self) -> "TrainerMetrics":
        from proximo.supervised.dpo.metrics import DPO_METRICS

        return DPO_METRICS

    def build(self, recipe: "DPORecipe") -> "DPOTask":
        from proximo.supervised.dpo.build import build_task

        return build_task(recipe)

    def dry_run(self, recipe: "DPORecipe") -> "Iterator[tuple[str, str]]":
        from proximo.data.formats.row_formats import preference_exchanges
        from proximo.run.dry_run import data_lines, describe_model, describe_reference, epoch_lines, trained_part

        yield "model", f"{describe_model(recipe.model)}, {trained_part(recipe.model)}"
        yield "reference", describe_reference(recipe.model, recipe.reference)
        yield from data_lines(recipe, recipe.data, partial(preference_exchanges, form=recipe.data.form))
        batch = f"{count_of(recipe.dpo.pairs_per_step, 'pair')} (two sequences each, read by policy and reference)"
        yield from epoch_lines(batch, recipe.dpo.num_epochs, "pairs", recipe.data.max_tokens)

    def plan(self, recipe: "DPORecipe", context: "StageContext") -> "StageCosts":
        from proximo.supervised.dpo.plan import plan

        return plan(recipe, context)


DPO = DPOKind()
