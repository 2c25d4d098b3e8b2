"""Registers KTO as a trainer. Heavy imports are inside the methods, so that the command line starts fast."""

from functools import partial
from typing import TYPE_CHECKING

from proximo.trainer_kinds import TrainerKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from proximo.metrics.trainer_metrics import TrainerMetrics
    from proximo.plan.stages import StageContext, StageCosts
    from proximo.supervised.kto.recipe import KTORecipe
    from proximo.supervised.kto.task import KTOTask


class KTOKind(TrainerKind["KTORecipe"]):
    name = "kto"
    help = """Train a policy on single answers labelled desirable or undesirable, without pairs or sampling (KTO).

    \b
    proximo kto kto.yaml --dry-run
    proximo kto kto.yaml model.path=models/sft kto.undesirable_weight=2
    proximo kto kto.yaml --resume

    docs/configuration.md lists every key, docs/kto.md says what it does and when to take it.
    """
    title = "KTO"
    short_title = "KTO"
    task = "Kahneman-Tversky optimisation (KTO)"
    card_settings = (
        "kto.num_epochs",
        "kto.examples_per_step",
        "kto.beta",
        "kto.desirable_weight",
        "kto.undesirable_weight",
        "kto.reference_point",
        "kto.optimizer.learning_rate",
        "data.max_tokens",
    )
    card_limits = (
        "Each answer was judged by itself: that one answer to a prompt is better than another was never compared. "
        "Answers that are in no row may have become likelier."
    )

    @property
    def schema(self) -> "type[KTORecipe]":
        from proximo.supervised.kto.recipe import KTORecipe

        return KTORecipe

    @property
    def metrics(self) -> "TrainerMetrics":
        from proximo.supervised.kto.metrics import KTO_METRICS

        return KTO_METRICS

    def build(self, recipe: "KTORecipe") -> "KTOTask":
        from proximo.supervised.kto.build import build_task

        return build_task(recipe)

    def dry_run(self, recipe: "KTORecipe") -> "Iterator[tuple[str, str]]":
        from proximo.data.formats.row_formats import labelled_exchanges
        from proximo.run.dry_run import data_lines, describe_model, describe_reference, epoch_lines, trained_part

        yield "model", f"{describe_model(recipe.model)}, {trained_part(recipe.model)}"
        yield "reference", describe_reference(recipe.model, recipe.reference)
        yield from data_lines(recipe, recipe.data, partial(labelled_exchanges, form=recipe.data.form))
        count = recipe.kto.examples_per_step
        mismatched = f", and {count} to other prompts" if recipe.kto.reference_point == "kl" else ""
        batch = f"{count} answers to their prompts{mismatched}, read by policy and reference"
        yield from epoch_lines(batch, recipe.kto.num_epochs, "answers", recipe.data.max_tokens)

    def plan(self, recipe: "KTORecipe", context: "StageContext") -> "StageCosts":
        from proximo.supervised.kto.plan import plan

        return plan(recipe, context)


KTO = KTOKind()
