"""`proximo evaluate`: a run's checkpoint on its held-out data, once more. Not the evaluations during training."""

import sys
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from proximo.checkpoint.fingerprints import changed_inputs, placed
from proximo.checkpoint.logs import JsonLines
from proximo.config.ppo.options import PPOConfig
from proximo.config.recipes import DPORecipe, PPORecipe, RewardRecipe, SFTRecipe
from proximo.errors import UserError
from proximo.metrics.catalogue import CATALOGUE
from proximo.metrics.formatting import format_number
from proximo.metrics.recorder import Recorder
from proximo.ppo import from_recipe
from proximo.ppo.task import PPOTask
from proximo.run.checkpoint_lookup import find_checkpoint, find_run, verify_models
from proximo.run.logs import Record
from proximo.run.preflight import inputs_of
from proximo.run.resolved_config import StageRecipe, saved_recipe
from proximo.supervised import dpo, reward, sft
from proximo.supervised.dpo_task import DPOTask
from proximo.supervised.reward_task import RewardTask
from proximo.supervised.sft_task import SFTTask
from proximo.working_directory import kept_working_directory

Task = SFTTask | RewardTask | DPOTask | PPOTask


def run_evaluate(
    folder: Path,
    *,
    checkpoint: str = "latest",
    num_prompts: int | None,
    output: Path | None,
    ppo: Mapping[str, Any] | None = None,
) -> int:
    """Evaluate as the run itself did, print the numbers, and write every sample to `output` where that is given.

    `ppo` holds settings of that section which differ from the run's.

    Raises RunFolderError for a folder without a run, and UserError where the run held out no data.
    """
    run = find_run(folder)
    found = find_checkpoint(run, checkpoint)
    with kept_working_directory():
        task = build_task(run, ppo or {})
    with ExitStack() as stack:
        if isinstance(task, PPOTask):
            stack.enter_context(closing(task))
        saved = placed(found.state.get("fingerprints", {}).get("inputs", {}), str(run.parent))
        for line in changed_inputs(saved, task.inputs_fingerprint):
            print(f"warning: other than in the run: {line}", file=sys.stderr)
        task.restore(found)
        with kept_working_directory():
            record = task.evaluate(num_prompts)
    if record is None:
        raise UserError(f"the run in {run} held out no data: set data.held_out_rows or data.evaluation_sources")
    _print(record, title=f"{run}, step {found.step}")
    if output is not None:
        with JsonLines(output) as lines:
            for sample in record.samples:
                lines.append({"step": found.step, **sample})
    return 0


def build_task(run: Path, changes: Mapping[str, Any]) -> Task:
    """The task of a run from the configuration that was saved with it, with `changes` in its section ppo.

    Raises RunFolderError where it is damaged, and UserError for changes that do not fit the run.
    """
    recipe = _with_changes(saved_recipe(run), changes)
    verify_models(inputs_of(recipe))
    match recipe:
        case PPORecipe() as recipe:
            return from_recipe.build_task(recipe)
        case SFTRecipe() as recipe:
            return sft.build_task(recipe)
        case RewardRecipe() as recipe:
            return reward.build_task(recipe)
        case DPORecipe() as recipe:
            return dpo.build_task(recipe)


def _with_changes(recipe: StageRecipe, changes: Mapping[str, Any]) -> StageRecipe:
    if not changes:
        return recipe
    if not isinstance(recipe, PPORecipe):
        raise UserError(f"{' and '.join(changes)} are about the responses of PPO, but this run is none: leave them out")
    try:
        ppo = PPOConfig.model_validate({**recipe.ppo.model_dump(), **changes})
    except ValidationError as error:
        raise UserError("; ".join(str(each["msg"]).removeprefix("Value error, ") for each in error.errors())) from error
    return recipe.model_copy(update={"ppo": ppo})


def _print(record: Record, *, title: str) -> None:
    recorder = Recorder()
    recorder.record_all(record.metrics)
    table = Table("metric", "value", title=title)
    for name, number in recorder.line().items():
        table.add_row(name, format_number(number, CATALOGUE.find(name).unit))
    Console().print(table)
