"""The supervised trainers as kinds of recipes, with the texts about them."""

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from proximo.message_text import count_of
from proximo.trainer_kinds import TrainerKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import ModuleType

    from proximo.metrics.shared_declarations import TrainerMetrics
    from proximo.plan.stages import StageContext, StageCosts
    from proximo.run.task import Task
    from proximo.supervised.dpo_recipe import DPORecipe
    from proximo.supervised.kto_recipe import KTORecipe
    from proximo.supervised.prm_recipe import PRMRecipe
    from proximo.supervised.recipes import SupervisedRecipe
    from proximo.supervised.reward_recipe import RewardRecipe
    from proximo.supervised.sft_recipe import SFTRecipe


Recipe = TypeVar("Recipe", bound="SupervisedRecipe")


class SupervisedKind(TrainerKind[Recipe]):
    """A trainer in two files that begin with its name, imported when they are first used.

    `NAME_recipe.py` has `SCHEMA` and `METRICS`, `NAME_trainer.py` has `build_task`.
    """

    def _file(self, name: str) -> "ModuleType":
        return import_module(f"proximo.supervised.{self.name}_{name}")

    @property
    def schema(self) -> type[Recipe]:
        return self._file("recipe").SCHEMA

    @property
    def metrics(self) -> "TrainerMetrics":
        return self._file("recipe").METRICS

    def build(self, recipe: Recipe) -> "Task":
        return self._file("trainer").build_task(recipe)

    def plan(self, recipe: Recipe, context: "StageContext") -> "StageCosts":
        from proximo.supervised.building import plan

        return plan(recipe, context)


class SFTKind(SupervisedKind["SFTRecipe"]):
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

    def dry_run(self, recipe: "SFTRecipe") -> "Iterator[tuple[str, str]]":
        from proximo.data.formats.row_formats import text_exchanges
        from proximo.run.dry_run import data_lines, describe_model, epoch_lines, trained_part

        yield "model", f"{describe_model(recipe.model)}, {trained_part(recipe.model)}"
        learns_all = recipe.data.train_on == "everything"
        reader = partial(text_exchanges, form=recipe.data.form, learns_all=learns_all)
        yield from data_lines(recipe, recipe.data, reader)
        batch = count_of(recipe.sft.examples_per_step, "example")
        yield from epoch_lines(batch, recipe.sft.num_epochs, "examples", recipe.data.max_tokens)


class RewardKind(SupervisedKind["RewardRecipe"]):
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

    def recognises(self, tree: "Mapping[str, Any]") -> bool:
        """The rewards of a recipe of PPO, under the same key, are a list."""
        return super().recognises(tree) and "ppo" not in tree and not isinstance(tree["reward"], (list, tuple))

    def dry_run(self, recipe: "RewardRecipe") -> "Iterator[tuple[str, str]]":
        from proximo.data.formats.row_formats import preference_exchanges
        from proximo.run.dry_run import data_lines, describe_model, epoch_lines, trained_part

        yield "model", f"{describe_model(recipe.model)} with a score head, {trained_part(recipe.model)}"
        yield from data_lines(recipe, recipe.data, partial(preference_exchanges, form=recipe.data.form))
        batch = f"{count_of(recipe.reward.pairs_per_step, 'pair')} (two sequences each)"
        yield from epoch_lines(batch, recipe.reward.num_epochs, "pairs", recipe.data.max_tokens)


class PRMKind(SupervisedKind["PRMRecipe"]):
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

    def dry_run(self, recipe: "PRMRecipe") -> "Iterator[tuple[str, str]]":
        from proximo.data.formats.row_formats import labelled_solutions
        from proximo.run.dry_run import data_lines, describe_model, epoch_lines, trained_part

        yield "model", f"{describe_model(recipe.model)} with a score head, {trained_part(recipe.model)}"
        yield from data_lines(recipe, recipe.data, labelled_solutions)
        counted = {"all": "all steps", "until_error": "the steps up to the first wrong one", "last": "the last step"}
        yield "", f"{recipe.data.step_separator!r} ends a step; {counted[recipe.data.train_on]} of a solution count"
        batch = count_of(recipe.prm.solutions_per_step, "solution")
        yield from epoch_lines(batch, recipe.prm.num_epochs, "solutions", recipe.data.max_tokens)


class DPOKind(SupervisedKind["DPORecipe"]):
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

    def dry_run(self, recipe: "DPORecipe") -> "Iterator[tuple[str, str]]":
        from proximo.data.formats.row_formats import preference_exchanges
        from proximo.run.dry_run import data_lines, describe_model, describe_reference, epoch_lines, trained_part

        yield "model", f"{describe_model(recipe.model)}, {trained_part(recipe.model)}"
        yield "reference", describe_reference(recipe.model, recipe.reference)
        yield from data_lines(recipe, recipe.data, partial(preference_exchanges, form=recipe.data.form))
        batch = f"{count_of(recipe.dpo.pairs_per_step, 'pair')} (two sequences each, read by policy and reference)"
        yield from epoch_lines(batch, recipe.dpo.num_epochs, "pairs", recipe.data.max_tokens)


class KTOKind(SupervisedKind["KTORecipe"]):
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


SFT, REWARD, PRM, DPO, KTO = SFTKind(), RewardKind(), PRMKind(), DPOKind(), KTOKind()
