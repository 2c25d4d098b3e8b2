"""Runs the stages of a pipeline one after the other; finished stages are skipped."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from proximo.checkpoint.run_folder import MERGED
from proximo.commands.export import export_model
from proximo.config.recipe import Recipe, TrainerRecipe
from proximo.config.schema.base import Section
from proximo.config.stages import MARK
from proximo.distributed.world import current
from proximo.metrics.report.page import write_pipeline_report
from proximo.metrics.report.tables import print_before_after, print_samples
from proximo.models.pretrained.folders import is_adapter_folder
from proximo.plan.machine import device_kind
from proximo.ppo.dry_run import environment_code
from proximo.ppo.recipe import PPORecipe
from proximo.run.checkpoint_lookup import verify_model
from proximo.run.checkpointing import stage_result
from proximo.run.loop import run_trainer
from proximo.run.make.reward_sources import check_sources
from proximo.run.options import RunOptions
from proximo.run.preflight import check_folders
from proximo.trainer_kinds import trainer_kinds


def run_recipe(recipe: Recipe, options: RunOptions) -> int:
    """Run a recipe: a single trainer, or the stages of a pipeline."""
    return _run(recipe, options, given=recipe) if isinstance(recipe, TrainerRecipe) else run_pipeline(recipe, options)


def _run(recipe: TrainerRecipe, options: RunOptions, *, given: TrainerRecipe) -> int:
    """Run a trainer. `given`: its recipe as it was written."""
    if device_kind(recipe.run) == "cuda":
        from proximo.plan.fitting import fitted, is_left_out  # what plans is not needed elsewhere

        recipe = fitted(recipe, options) if is_left_out(given) else recipe
    return run_trainer(recipe, options)


def run_pipeline(recipe: Recipe, options: RunOptions) -> int:
    """Run the stages that the recipe has, each in its folder; returns the exit status of the last one that ran.

    With `resume` finished stages are skipped and the interrupted one is resumed. All folders, reward functions,
    services and the code of environments are checked before anything runs.
    """
    folder, world = Path(recipe.run.folder), current()
    stages = [stage for _, stage in recipe.given_stages()]

    resume, overwrite = options.resume, options.overwrite
    world.on_rank_0(
        lambda: check_folders(recipe, resume=resume, overwrite=overwrite), what="the checks of the run folders"
    )
    # PPO checks again when it starts, but by then the earlier stages have run for nothing.
    check_sources(section for stage in stages for section in stage.sections().values())
    played = [stage for stage in stages if isinstance(stage, PPORecipe)]
    world.on_rank_0(lambda: [environment_code(stage) for stage in played], what="the import of environments")
    of_stage = replace(
        options,
        resume="never" if resume == "never" else "auto",
        passes_over_damage=resume == "auto",
        pipeline_folder=str(folder),
    )
    for stage in stages:
        try:
            # As plain values: a section of the user's own cannot be sent.
            values = world.on_rank_0(partial(resolved_values, stage, folder), what="the models of earlier stages")
            status = _run(
                type(stage).model_validate(values), replace(of_stage, more_follows=stage is not stages[-1]), given=stage
            )
        except Exception as error:
            world.publish(world.explain(error))
            if world.leads:
                with suppress(Exception):  # report what ended the stage instead
                    write_pipeline_report(folder)
            raise
        if status != 0:
            return status
    world.on_rank_0(lambda: _report(folder, stages[-1], quiet=options.quiet), what="the report of the pipeline")
    return 0


def _report(folder: Path, last: TrainerRecipe, *, quiet: bool) -> None:
    report = write_pipeline_report(folder)
    if not quiet:
        console = Console()
        print_before_after(Path(last.run.folder), console=console)
        print_samples(Path(last.run.folder), console=console)
        console.print(f"report: {report}", soft_wrap=True)


def resolved_values(section: Section, folder: Path) -> dict[str, Any]:
    """The values of a section with `@sft`, `@reward` and so on replaced by the folders of those stages' models."""

    def resolve(value: Any, *, merge: bool = True) -> Any:
        if isinstance(value, Mapping):
            return {key: resolve(item, merge=not value.get("share_base")) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [resolve(item) for item in value]
        if value not in references:
            return value
        return str(whole_result(folder, value) if merge else stage_result(folder, value))

    references = {f"{MARK}{kind.name}" for kind in trainer_kinds()}
    return resolve(section.model_dump(mode="json"))


def whole_result(folder: Path, reference: str) -> Path:
    """The model of a stage as whole weights. An adapter is merged into its base, in a folder beside the checkpoints."""
    found = stage_result(folder, reference)
    if not is_adapter_folder(found):
        return found
    # Later stages start from whole models, so the adapter of this stage is merged into the base of a later one.
    merged = folder / reference.removeprefix(MARK) / MERGED / found.parent.name
    if not merged.is_dir():
        verify_model(str(found))
        merged.parent.mkdir(exist_ok=True)
        export_model(found, merged, merge=True)
    return merged
