"""`proximo evaluate`: a run's checkpoint on its held-out data, once more. Not the evaluations during training."""

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from proximo.checkpoint.run_folder import RESOLVED_CONFIG
from proximo.config.recipes import PPORecipe, RewardRecipe, SFTRecipe
from proximo.errors import RunFolderError, UserError
from proximo.metrics.formatting import format_number
from proximo.metrics.recorder import Recorder
from proximo.trainers import ppo_run, reward, sft
from proximo.trainers.loop import Record
from proximo.trainers.ppo_task import PPOTask
from proximo.trainers.reward_task import RewardTask
from proximo.trainers.saved import find_checkpoint, find_run
from proximo.trainers.sft_task import SFTTask

Task = SFTTask | RewardTask | PPOTask


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
        output.write_text("".join(json.dumps({"step": found.step, **sample}) + "\n" for sample in record.samples))
    return 0


def build_task(run: Path) -> Task:
    """The task of a run from the configuration that was saved with it."""
    saved = run / RESOLVED_CONFIG
    if not saved.is_file():
        raise RunFolderError(f"{run} has no {RESOLVED_CONFIG}, so its models and data are not known")
    content = json.loads(saved.read_text(encoding="utf-8"))
    if "policy" in content:
        return ppo_run.build_task(PPORecipe.model_validate(content))
    if "sft" in content:
        return sft.build_task(SFTRecipe.model_validate(content))
    return reward.build_task(RewardRecipe.model_validate(content))


def _print(record: Record, *, title: str) -> None:
    recorder = Recorder()
    recorder.record_all(record.metrics)
    table = Table("metric", "value", title=title)
    for name, number in recorder.line().items():
        table.add_row(name, format_number(number))
    Console().print(table)
