"""`proximo evaluate`: a run's checkpoint on its held-out data, once more. Not the evaluations during training."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from proximo.checkpoint.logs import JsonLines
from proximo.checkpoint.run_folder import RESOLVED_CONFIG
from proximo.config.recipes import DPORecipe, PPORecipe, RewardRecipe, SFTRecipe
from proximo.errors import RunFolderError, UserError
from proximo.metrics.formatting import format_number
from proximo.metrics.recorder import Recorder
from proximo.trainers import dpo, ppo_run, reward, sft
from proximo.trainers.dpo_task import DPOTask
from proximo.trainers.loop import Record
from proximo.trainers.ppo_task import PPOTask
from proximo.trainers.reward_task import RewardTask
from proximo.trainers.saved import find_checkpoint, find_run
from proximo.trainers.sft_task import SFTTask

Task = SFTTask | RewardTask | DPOTask | PPOTask


def run_evaluate(folder: Path, *, checkpoint: str = "latest", num_prompts: int | None, output: Path | None) -> int:
    """Evaluate as the run itself did, print the numbers, and write every sample to `output` where that is given.

    Raises RunFolderError for a folder without a run, and UserError where the run held out no data.
    """
    if output is not None and output.exists():
        raise UserError(f"{output} exists and is left as it is: give a file that does not exist yet")
    if output is not None and not output.parent.is_dir():
        raise UserError(f"there is no folder {output.parent} to write {output.name} to")
    run = find_run(folder)
    found = find_checkpoint(run, checkpoint)
    task = build_task(run)
    task.restore(found)
    record = task.evaluate(num_prompts)
    if record is None:
        raise UserError(f"the run in {run} held out no data: set data.held_out_rows or data.evaluation_sources")
    _print(record, title=f"{run}, step {found.step}")
    if output is not None:
        with JsonLines(output) as lines:
            for sample in record.samples:
                lines.append({"step": found.step, **sample})
    return 0


def build_task(run: Path) -> Task:
    """The task of a run from the configuration that was saved with it. Raises RunFolderError where it is damaged."""
    saved = run / RESOLVED_CONFIG
    if not saved.is_file():
        raise RunFolderError(f"{run} has no {RESOLVED_CONFIG}, so its models and data are not known")
    match _saved_recipe(saved):
        case PPORecipe() as recipe:
            return ppo_run.build_task(recipe)
        case SFTRecipe() as recipe:
            return sft.build_task(recipe)
        case RewardRecipe() as recipe:
            return reward.build_task(recipe)
        case DPORecipe() as recipe:
            return dpo.build_task(recipe)


def _saved_recipe(saved: Path) -> SFTRecipe | RewardRecipe | DPORecipe | PPORecipe:
    try:
        content = json.loads(saved.read_text(encoding="utf-8"))
        content = _where_it_lies(content, saved.parent)
        kinds = {"policy": PPORecipe, "sft": SFTRecipe, "dpo": DPORecipe}
        return next((kind for key, kind in kinds.items() if key in content), RewardRecipe).model_validate(content)
    except (ValueError, TypeError, KeyError) as error:  # no JSON, no mapping, or not what a recipe holds
        reason = str(error).partition("\n")[0]
        raise RunFolderError(f"{saved} is damaged, or of another version ({reason}): it cannot be evaluated") from error


def _where_it_lies(content: Any, run: Path) -> Any:
    """The settings of a stage whose pipeline was moved: what lay below the old folder is looked for below the new."""
    before, now = Path(content["run"]["folder"]).parent, run.parent

    def moved(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: moved(part) for name, part in value.items()}
        if isinstance(value, list):
            return [moved(part) for part in value]
        if not isinstance(value, str) or not value.startswith(f"{before}/") or Path(value).exists():
            return value
        found = now / Path(value).relative_to(before)
        return str(found) if found.exists() else value

    return content if before == now else moved(content)


def _print(record: Record, *, title: str) -> None:
    recorder = Recorder()
    recorder.record_all(record.metrics)
    table = Table("metric", "value", title=title)
    for name, number in recorder.line().items():
        table.add_row(name, format_number(number))
    Console().print(table)
