"""`proximo evaluate`: evaluates a checkpoint of a run on the run's held-out data."""

import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.jupyter import JupyterMixin
from rich.table import Table

from proximo.checkpoint.atomic import temporary_beside
from proximo.checkpoint.fingerprints import Fingerprints, changed_inputs, relocated
from proximo.checkpoint.logs import JsonLines
from proximo.checkpoint.reading import Checkpoint
from proximo.errors import UserError
from proximo.metrics.catalogue import step_line
from proximo.metrics.report.tables import Samples, metrics_table
from proximo.run.checkpoint_lookup import find_checkpoint, find_run, saved_recipe, verify_models
from proximo.run.preflight import inputs_of
from proximo.run.resumption import function_sources
from proximo.run.task import Task
from proximo.trainer_kinds import trainer_of
from proximo.user_code import kept_working_directory


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation(JupyterMixin):
    """The evaluation of a checkpoint on held-out data. A notebook shows its metrics and samples as tables."""

    run: Path
    step: int
    metrics: Mapping[str, float]
    samples: Samples

    def __rich__(self) -> Group:
        return Group(self.table, self.samples)

    @property
    def table(self) -> Table:
        """The metrics as a table of names and values."""
        return metrics_table(self.metrics, title=f"{self.run}, step {self.step}")


def run_evaluate(
    folder: Path,
    *,
    checkpoint: str = "latest",
    num_prompts: int | None,
    output: Path | None,
    **settings: Any,
) -> int:
    """Evaluate, print the metrics, and write every sample to `output` if given. As `evaluate` for the rest."""
    evaluation = evaluate(folder, checkpoint=checkpoint, num_prompts=num_prompts, **settings)
    Console().print(evaluation.table)
    if output is not None:
        unfinished = temporary_beside(output)
        try:
            with closing(JsonLines(unfinished)) as lines:
                for sample in evaluation.samples:
                    lines.append({"step": evaluation.step, **sample})
            unfinished.replace(output)
        finally:
            unfinished.unlink(missing_ok=True)
    return 0


def evaluate(
    folder: Path,
    *,
    checkpoint: str = "latest",
    num_prompts: int | None = None,
    samples_per_prompt: int | None = None,
    solved_score: float | None = None,
    greedy: bool | None = None,
    engine: str | None = None,
) -> Evaluation:
    """Evaluate a checkpoint as the run did, except for the settings that are given. `engine`: as for `generate`.

    Raises RunFolderError for a folder without a run, and UserError if the run has no held-out data or `num_prompts` is
    below 1.
    """
    if num_prompts is not None and num_prompts < 1:
        raise UserError(f"num_prompts of an evaluation is at least 1, got {num_prompts}")
    run = find_run(folder)
    found = find_checkpoint(run, checkpoint)
    settings = {
        "evaluation_samples_per_prompt": samples_per_prompt,
        "solved_score": solved_score,
        "evaluate_greedy": greedy,
        "engine": engine,
    }
    with kept_working_directory():
        task = build_task(run, {name: value for name, value in settings.items() if value is not None})
    with closing(task):
        _warn_of_changes(run, found, task)
        task.restore(found)
        with kept_working_directory():
            record = task.evaluate(num_prompts)
    if record is None:
        raise UserError(f"the run in {run} held out no data: set data.held_out_rows or data.evaluation_sources")
    line, _ = step_line(record.metrics)
    return Evaluation(run=run, step=found.step, metrics=line, samples=Samples(record.samples))


def _warn_of_changes(run: Path, checkpoint: Checkpoint, task: Task) -> None:
    """Print which data, models and reward functions have changed since the checkpoint was saved."""
    if "fingerprints" not in checkpoint.state:
        return
    saved = Fingerprints.from_json(checkpoint.state["fingerprints"])
    before = {**relocated(saved.inputs, str(run.parent)), "functions": saved.functions}
    now = {**task.inputs_fingerprint, "functions": function_sources(saved_recipe(run))}
    for line in changed_inputs(before, now):
        print(f"warning: other than in the run: {line}", file=sys.stderr)


def build_task(run: Path, changes: Mapping[str, Any]) -> Task:
    """The task of a run, built from its saved config with `changes`.

    Raises RunFolderError if the config is damaged, and UserError for changes that do not apply to the run.
    """
    recipe = saved_recipe(run)
    if changes:
        recipe = recipe.with_evaluation_settings(changes)
    verify_models(inputs_of(recipe))
    return trainer_of(recipe).build(recipe)
