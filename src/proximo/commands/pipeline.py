"""The three steps in a row: SFT, reward model, PPO. Finished stages are skipped. Not the stages themselves."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from proximo.checkpoint.run_folder import MERGED
from proximo.checkpoint.store import CheckpointStore
from proximo.commands.export import export_model, is_adapter
from proximo.config.recipes import PipelineRecipe, PPORecipe, RewardRecipe, SFTRecipe
from proximo.errors import ConfigError
from proximo.metrics.report.page import write_pipeline_report
from proximo.metrics.report.tables import print_before_after, print_samples
from proximo.ppo.from_recipe import run_ppo
from proximo.run.build.reward_sources import check_services
from proximo.run.checkpoint_lookup import verify_model
from proximo.run.folders import check_folders
from proximo.run.options import RunOptions
from proximo.supervised.reward import run_reward
from proximo.supervised.sft import run_sft

AnyStage = SFTRecipe | RewardRecipe | PPORecipe
Stage = TypeVar("Stage", bound=AnyStage)

ROLES = {"@sft": ("sft", "policy"), "@reward": ("reward", "reward")}
"""A reference in a recipe -> the stage whose result it names, and the role of that result in its checkpoint."""


def run_pipeline(recipe: PipelineRecipe, options: RunOptions) -> int:
    """Run the stages that the recipe has, each in its folder; returns the exit status of the last one that ran.

    With `resume` the finished stages are skipped and the one under way goes on. All folders are checked, and remote
    reward services asked, before anything runs.
    """
    folder = Path(recipe.run.folder)
    stages = [stage for stage in (recipe.sft, recipe.reward, recipe.ppo) if stage is not None]
    check_folders(recipe, resume=options.resume, overwrite=options.overwrite)
    options = replace(options, resume="never" if options.resume == "never" else "auto", pipeline_folder=str(folder))
    # Asked again when PPO begins, but by then the stages before it have cost their time.
    check_services([*recipe.ppo.reward, *([recipe.ppo.gold] if recipe.ppo.gold else [])])
    for stage in stages:
        try:
            status = _run_stage(resolve_references(stage, folder), options)
        except Exception:
            with suppress(Exception):  # what ended the stage is what must be told
                write_pipeline_report(folder)
            raise
        if status != 0:
            return status
    report = write_pipeline_report(folder)
    if not options.quiet:
        console = Console()
        print_before_after(Path(recipe.ppo.run.folder), console=console)
        print_samples(Path(recipe.ppo.run.folder), console=console)
        console.print(f"report: {report}", soft_wrap=True)
    return 0


def _run_stage(stage: AnyStage, options: RunOptions) -> int:
    match stage:
        case SFTRecipe():
            return run_sft(stage, options)
        case RewardRecipe():
            return run_reward(stage, options)
        case PPORecipe():
            return run_ppo(stage, options)


def resolve_references(section: Stage, folder: Path) -> Stage:
    """The section with `@sft` and `@reward` replaced by the folders that those stages made."""

    def resolve(value: Any, *, merge: bool = True) -> Any:
        if isinstance(value, Mapping):
            return {key: resolve(item, merge=not value.get("share_base")) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [resolve(item) for item in value]
        return str(stage_result(folder, value, merge=merge)) if isinstance(value, str) and value in ROLES else value

    return type(section).model_validate(resolve(section.model_dump(mode="json")))


def stage_result(folder: Path, reference: str, *, merge: bool = True) -> Path:
    """The folder of the model that a stage made: its best checkpoint where one was measured, else its latest.

    An adapter comes merged into its base; with `merge=False` by itself, for a role that shares the base.
    Raises ConfigError where that stage has no checkpoint.
    """
    stage, role = ROLES[reference]
    store = CheckpointStore(folder / stage / "checkpoints")
    checkpoint = store.best() or store.latest()
    if checkpoint is None:
        raise ConfigError(
            f"{reference} names the result of stage {stage}, but {folder / stage} has no checkpoint: "
            f"give the recipe a section {stage}, or name a model by its path"
        )
    found = checkpoint.path(role)
    if not merge or not is_adapter(found):
        return found
    # What follows starts from whole models: the base of a later adapter is what this stage made, adapter included.
    merged = folder / stage / MERGED / checkpoint.folder.name
    if not merged.is_dir():
        verify_model(str(found))
        merged.parent.mkdir(exist_ok=True)
        export_model(found, merged, merge=True)
    return merged
