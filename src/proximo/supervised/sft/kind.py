"""Registers supervised fine-tuning as a trainer.

Heavy imports are inside the methods, so that the command line starts fast.
"""

from functools import partial
from typing import TYPE_CHECKING

from proximo.counts import count_of
from proximo.trainer_kinds import TrainerKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from proximo.metrics.trainer_metrics import TrainerMetrics
    from proximo.plan.stages import StageContext, StageCosts
    from proximo.supervised.sft.recipe import SFTRecipe
    from proximo.supervised.sft.task import SFTTask


class SFTKind(TrainerKind["SFTRecipe"]):
    name = "sft"
    help = """Fine-tune a language model on texts, on prompts with answers, or on conversations.

    \b
    proximo sft sft.yaml --dry-run
    proximo sft sft.yaml sft.num_epochs=2 data.sources.0.path=mine.jsonl
    proximo sft sft.yaml --resume=auto        for schedulers: start, go on, or be done

    docs/configuration.md lists every key, docs/data.md the forms of data.
    """
    title = "Supervised fine-tuning"
    short_title = "SFT"
    task = "supervised fine-tuning"
    card_settings = ("sft.num_epochs", "sft.examples_per_step", "sft.optimizer.learning_rate", "data.max_tokens")
    card_limits = "It writes what the texts that it learned from are like, their mistakes and biases included."

    @property
    def schema(self) -> "type[SFTRecipe]":
        from proximo.supervised.sft.recipe import SFTRecipe

        return SFTRecipe

    @property
    def metrics(self) -> "TrainerMetrics":
        from proximo.supervised.sft.metrics import SFT_METRICS

        return SFT_METRICS

    def build(self, recipe: "SFTRecipe") -> "SFTTask":
        from proximo.supervised.sft.build import build_task

        return build_task(recipe)

    def dry_run(self, recipe: "SFTRecipe") -> "Iterator[tuple[str, str]]":
        from proximo.data.formats.row_formats import text_exchanges
        from proximo.run.dry_run import data_lines, describe_model, epoch_lines, trained_part

        yield "model", f"{describe_model(recipe.model)}, {trained_part(recipe.model)}"
        learns_all = recipe.data.train_on == "everything"
        reader = partial(text_exchanges, form=recipe.data.form, learns_all=learns_all)
        yield from data_lines(recipe, recipe.data, reader)
        batch = count_of(recipe.sft.examples_per_step, "example")
        yield from epoch_lines(batch, recipe.sft.num_epochs, "examples", recipe.data.max_tokens)

    def plan(self, recipe: "SFTRecipe", context: "StageContext") -> "StageCosts":
        from proximo.supervised.sft.plan import plan

        return plan(recipe, context)


SFT = SFTKind()
