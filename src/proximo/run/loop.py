"""The run around a trainer: steps, evaluations, logs, checkpoints, interruption, resume. Knows no algorithm."""

import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

from proximo.checkpoint.environment import describe_environment
from proximo.checkpoint.fingerprints import Fingerprints, check_fingerprints, relocatable, relocated
from proximo.checkpoint.interruption import Interruption
from proximo.checkpoint.logs import cut_back
from proximo.checkpoint.reading import Checkpoint
from proximo.checkpoint.run_folder import EndState, RunFolder, open_run
from proximo.checkpoint.schedule import SaveSchedule
from proximo.checkpoint.store import CheckpointStore
from proximo.config.recipe import TrainerRecipe
from proximo.config.saved import read_saved
from proximo.errors import ProximoError, RunFolderError
from proximo.metrics.console import LoggedProgress, ProgressInfo, ProgressView, open_progress
from proximo.metrics.report.page import write_report
from proximo.metrics.report.views import run_alarms
from proximo.metrics.run_files import read_run
from proximo.metrics.values import Sum
from proximo.models.precision.placement import say_precision
from proximo.native.library import why_no_kernels
from proximo.run.checkpoint_lookup import verify_models
from proximo.run.folders import check_folders
from proximo.run.logs import Logs, Record
from proximo.run.memory import memory_advice
from proximo.run.model_card import write_final_cards
from proximo.run.optional_dependencies import check_extras
from proximo.run.options import RunOptions
from proximo.run.preflight import inputs_of
from proximo.run.progress_messages import progress_messages, progress_warnings
from proximo.run.resume_fingerprint import function_sources
from proximo.run.sinks import check_sinks
from proximo.run.task import Task
from proximo.trainer_kinds import trainer_of
from proximo.working_directory import kept_working_directory

MAY_CHANGE = (
    "run.folder",
    "run.save_every_steps",
    "run.save_every_minutes",
    "run.keep_last",
    "run.grace_seconds",
    "run.tensorboard",
    "run.sinks",
    "run.token_cache",
)
"""Settings of every run that may change on resume: none of them affects the steps already taken. A trainer adds its own
(`config/recipe.py::TrainerRecipe.may_change`).
"""
ENVIRONMENT_SETTINGS = ("run.num_threads", "run.device")
"""Settings that may change on resume with `--allow-different-environment`, beside the devices of single models."""


def run_trainer(recipe: TrainerRecipe, options: RunOptions) -> int:
    """Build the task of the recipe and run it to its end; returns the exit status."""
    return run_task(lambda: trainer_of(recipe).build(recipe), recipe, options)


def run_task(build: Callable[[], Task], recipe: TrainerRecipe, options: RunOptions) -> int:
    """Build the task and run it to its end in its folder; returns the exit status.

    Nothing in the folder is touched before the task is built, and an earlier run in it is kept until the new one has
    taken a step, so that a mistake in data, models or a reward loses nothing.
    """
    check_folders(recipe, resume=options.resume, overwrite=options.overwrite)
    check_extras(recipe.run)
    check_sinks(recipe.run)
    verify_models(inputs_of(recipe))
    with kept_working_directory():
        task = build()
    with (
        closing(task),
        open_run(Path(recipe.run.folder), resume=options.resume, overwrite=options.overwrite) as opened,
    ):
        return _Loop(opened, task, recipe, options).run()


class _Loop:
    """The part of a run between a start and its end or interruption."""

    def __init__(self, folder: RunFolder, task: Task, recipe: TrainerRecipe, options: RunOptions) -> None:
        run = recipe.run
        self.folder = folder
        self.task = task
        self.trainer = trainer_of(recipe)
        chosen = say_precision(run.precision, task.device)
        self.notes = [*([chosen] if chosen else []), *task.notes]
        self.run_config = run
        self.options = options
        self.store = CheckpointStore(
            folder.checkpoints, keep_last=run.keep_last, best="lowest" if task.best_is_lowest else "highest"
        )
        self.num_log_lines: Mapping[str, int] = {}
        self.recipe = recipe
        self.resolved = recipe.model_dump(mode="json")
        self.environment = describe_environment(device=task.device) | {"functions": function_sources(recipe)}
        self.fingerprints = Fingerprints(
            config=relocatable(self.resolved, options.pipeline_folder),
            inputs=relocatable(task.inputs_fingerprint, options.pipeline_folder),
            environment=self.environment,
        )

    def run(self) -> int:
        first = self._restore()
        last = self.task.num_steps
        if first >= last and first > 0:
            return self._nothing_to_do(first)
        self.folder.outcome.unlink(missing_ok=True)
        self.folder.write_config(self.options.recipe_text, self.resolved)
        self.folder.write_environment(self.environment)
        deleted = list(self._cut_logs_back(first))
        info = ProgressInfo(trainer=self.trainer, total_steps=last, first_step=first)
        progress = LoggedProgress(info, self.folder.log, open_progress(info, quiet=self.options.quiet))
        try:
            if self.task.device == "cpu" and (reason := why_no_kernels()) is not None:
                progress.log_only(f"{reason}\n")  # already shown while the models were built
            for note in self.notes:
                progress.note(note)
            for warning in deleted:
                progress.warn(warning)
            with (
                progress_warnings(progress),
                progress_messages(progress),
                Logs(self.folder, progress, self.run_config, self.resolved, info=info) as logs,
            ):
                status = self._steps(first, last, logs, progress)
            self._end(progress, "stopped" if status else "finished")
            return status
        except Exception as error:
            progress.log_only(traceback.format_exc())
            with suppress(Exception):  # such as a full disk: report what ended the run instead
                self._end(progress, "failed", reason=_reason(error))
            raise
        finally:
            progress.close()

    def _end(self, progress: ProgressView, state: EndState, *, reason: str | None = None) -> None:
        """Write the outcome, and the report unless the run is to be resumed."""
        if state == "finished":
            write_final_cards(self.folder.path)
        self.folder.write_outcome(state, total_steps=self.task.num_steps, reason=reason)
        if state == "stopped":
            return
        steps = f": {self.task.num_steps} steps" if state == "finished" else ""
        report = self._shown(write_report(self.folder.path))
        if (failed := self.folder.failed_start) is not None:
            report = self._shown(failed / report.name)
            kept = self._shown(self.folder.path)
            progress.note(f"the run that was in {kept} is put back; what this one wrote is in {self._shown(failed)}")
        progress.note(f"{state}{steps}, report in {report}")
        for alarm in run_alarms(read_run(self.folder.path)):
            progress.note(f"{alarm.severity}: {alarm.text}")

    def _steps(self, first: int, last: int, logs: Logs, progress: ProgressView) -> int:
        schedule = SaveSchedule(
            every_steps=self.run_config.save_every_steps, every_minutes=self.run_config.save_every_minutes
        )
        if not self.folder.resuming:
            self._log(logs, 0, self._evaluate(progress, 0))
        with Interruption(grace_seconds=self.run_config.grace_seconds) as interruption:
            for step in range(first + 1, last + 1):
                progress.phase("training")
                with kept_working_directory(), memory_advice(self.recipe.memory_settings, "training", step=step):
                    record = self.task.step(step)
                metric = self._finish_step(logs, progress, step, record)
                stopping = interruption.requested
                if stopping:
                    interruption.step_ended()
                due = step == last or schedule.due(step)
                if stopping or due:
                    # A save caused by a signal must not become the best: an uninterrupted run would not have made it.
                    self._save(logs, step, metric if due else None)
                    schedule.saved()
                if stopping:
                    progress.note(f"stopped by a signal after step {step}; go on with --resume")
                    return interruption.exit_status
        return 0

    def _finish_step(self, logs: Logs, progress: ProgressView, step: int, record: Record) -> float | None:
        """Evaluate if it is due, write the step's line, and return the metric that ranks checkpoints."""
        every = self.run_config.evaluate_every_steps
        evaluation = None
        if step == self.task.num_steps or (every is not None and step % every == 0):
            evaluation = self._evaluate(progress, step)
        metric = self._log(logs, step, record, evaluation)
        self.folder.has_begun()
        return metric

    def _evaluate(self, progress: ProgressView, step: int) -> Record | None:
        progress.phase("evaluation")
        start = time.perf_counter()
        with kept_working_directory(), memory_advice(self.recipe.memory_settings, "evaluation", step=step):
            record = self.task.evaluate()
        if record is None:
            return None
        seconds = {"time/evaluate_seconds": Sum(time.perf_counter() - start)}
        return Record(metrics={**record.metrics, **seconds}, samples=record.samples)

    def _log(self, logs: Logs, step: int, *records: Record | None) -> float | None:
        given = [record for record in records if record is not None]
        with kept_working_directory():  # user-defined sinks run here
            line = logs.write(step, given)
        return None if self.task.best_metric is None else line.get(self.task.best_metric)

    def _save(self, logs: Logs, step: int, metric: float | None) -> None:
        logs.sync()
        state = {
            "task": dict(self.task.state()),
            "fingerprints": self.fingerprints.to_json(),
            "num_log_lines": logs.num_lines,
        }
        self.store.save(step, self.task.writers(), state, metric=metric)

    def _restore(self) -> int:
        """Steps already done: 0 for a new run."""
        if not self.folder.resuming:
            return 0
        checkpoint = self.store.load()
        other_environment = self.options.allow_different_environment
        elsewhere = (*ENVIRONMENT_SETTINGS, *(f"{key}.device" for key in self.recipe.sections()))
        differences = check_fingerprints(
            self._saved_fingerprints(checkpoint),
            self.fingerprints,
            may_change=(*MAY_CHANGE, *self.recipe.may_change, *(elsewhere if other_environment else ())),
            allow_different_environment=other_environment,
        )
        self.num_log_lines = checkpoint.state["num_log_lines"]
        self.notes.append(f"going on after step {checkpoint.step}")
        self.notes += [f"resumed in another environment: {line}" for line in differences]
        self.task.restore(checkpoint)
        return checkpoint.step

    def _cut_logs_back(self, step: int) -> Iterator[str]:
        """Cut each log back to `step`; yields a warning for each log that has lost lines since the checkpoint."""
        for log in (self.folder.metrics, self.folder.samples):
            found, saved = cut_back(log, step if self.folder.resuming else -1), self.num_log_lines.get(log.name, 0)
            if found != saved:
                yield (
                    f"{self._shown(log)} has {found} lines up to step {step}, and had {saved} when the checkpoint was "
                    "saved: it was changed since. The training goes on with the same bits; curves and report show "
                    "what is left"
                )

    def _shown(self, path: Path) -> Path:
        """A path inside the run folder, spelled as in the recipe."""
        return Path(self.run_config.folder, path.relative_to(self.folder.path))

    def _saved_fingerprints(self, checkpoint: Checkpoint) -> Fingerprints:
        """The saved fingerprints, with defaults for settings that are newer than the checkpoint."""
        saved, folder = Fingerprints.from_json(checkpoint.state["fingerprints"]), self.options.pipeline_folder
        known = read_saved(
            type(self.recipe), relocated(saved.config, folder), saved_by=saved.environment.get("proximo")
        )
        return replace(saved, config=relocatable(known.model_dump(mode="json"), folder))

    def _nothing_to_do(self, step: int) -> int:
        message = f"the run in {self._shown(self.folder.path)} is finished: step {step} of {self.task.num_steps}"
        if self.options.resume == "must":
            raise RunFolderError(
                f"{message}, so --resume would train nothing; raise the number of steps, or use --resume=auto "
                "where a finished run is fine"
            )
        self._finish_interrupted_end()
        open_progress(ProgressInfo(trainer=self.trainer, total_steps=step), quiet=self.options.quiet).note(message)
        return 0

    def _finish_interrupted_end(self) -> None:
        """Finish what a crash after the last checkpoint left undone: its save, model cards and report."""
        self.store.tidy()
        write_final_cards(self.folder.path)
        if not self.folder.outcome.is_file():
            self.folder.write_outcome("finished", total_steps=self.task.num_steps)
        report, metrics = self.folder.report, self.folder.metrics
        if not report.is_file() or report.stat().st_mtime < metrics.stat().st_mtime:
            write_report(self.folder.path)


def _reason(error: Exception) -> str:
    """One line. Proximo's own errors explain themselves; others are prefixed with their type."""
    words = " ".join(str(error).split())
    return words if isinstance(error, ProximoError) and words else f"{type(error).__name__}: {words}".rstrip(": ")
