"""Registers process reward model training as a trainer.

Heavy imports are inside the methods, so that the command line starts fast.
"""

from typing import TYPE_CHECKING

from proximo.counts import count_of
from proximo.trainer_kinds import TrainerKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from proximo.metrics.trainer_metrics import TrainerMetrics
    from proximo.plan.stages import StageContext, StageCosts
    from proximo.supervised.prm.recipe import PRMRecipe
    from proximo.supervised.prm.task import PRMTask


class PRMKind(TrainerKind["PRMRecipe"]):
    name = "prm"
    help = """Train a process reward model on solutions whose steps are labelled right or wrong.

    \b
    proximo prm prm.yaml --dry-run
    proximo prm prm.yaml model.path=runs/sft-model data.train_on=until_error
    proximo prm prm.yaml --resume

    docs/configuration.md lists every key, docs/data.md the form of the data.
    """
    title = "Process reward model"
    short_title = "PRM"
    task = "training of a process reward model"
    card_settings = (
        "prm.num_epochs",
        "prm.solutions_per_step",
        "prm.optimizer.learning_rate",
        "data.step_separator",
        "data.train_on",
        "data.max_tokens",
    )
    card_limits = (
        "It judges steps like those that it was trained on, at the token that ends the separator behind a step. Its "
        "head gives the log-odds that the step is right; at other tokens it means nothing. A policy that is trained "
        "against it will find steps that look right and are not."
    )

    @property
    def schema(self) -> "type[PRMRecipe]":
        from proximo.supervised.prm.recipe import PRMRecipe

        return PRMRecipe

    @property
    def metrics(self) -> "TrainerMetrics":
        from proximo.supervised.prm.metrics import PRM_METRICS

        return PRM_METRICS

    def build(self, recipe: "PRMRecipe") -> "PRMTask":
        from proximo.supervised.prm.build import build_task

        return build_task(recipe)

    def dry_run(self, recipe: "PRMRecipe") -> "Iterator[tuple[str, str]]":
        from proximo.data.stepwise.labelled_rows import labelled_solutions
        from proximo.run.dry_run import data_lines, describe_model, epoch_lines, trained_part

        yield "model", f"{describe_model(recipe.model)} with a score head, {trained_part(recipe.model)}"
        yield from data_lines(recipe, recipe.data, labelled_solutions)
        counted = {"all": "all steps", "until_error": "the steps up to the first wrong one", "last": "the last step"}
        yield "", f"{recipe.data.step_separator!r} ends a step; {counted[recipe.data.train_on]} of a solution count"
        batch = count_of(recipe.prm.solutions_per_step, "solution")
        yield from epoch_lines(batch, recipe.prm.num_epochs, "solutions", recipe.data.max_tokens)

    def plan(self, recipe: "PRMRecipe", context: "StageContext") -> "StageCosts":
        from proximo.supervised.prm.plan import plan

        return plan(recipe, context)


PRM = PRMKind()
