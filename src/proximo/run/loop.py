"""The run around a task, of whatever algorithm: steps, evaluations, logs, checkpoints, interruption, resume."""

import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from proximo.checkpoint.environment import describe_environment
from proximo.checkpoint.fingerprints import Fingerprints, relocatable
from proximo.checkpoint.ranks import check_shared
from proximo.checkpoint.run_folder import CHECKPOINTS, RANKS, SERVERS, RunFolder, open_run
from proximo.checkpoint.store import CheckpointStore
from proximo.config.recipe import TrainerRecipe
from proximo.distributed.signals import Interruption
from proximo.distributed.world import current
from proximo.errors import GuardError, RankError, RunFolderError, TrainingError
from proximo.kernels import kernels_of
from proximo.metrics.console import ProgressInfo, open_progress
from proximo.metrics.values import Sum
from proximo.models.precision.placement import say_precision
from proximo.run.checkpoint_lookup import verify_models
from proximo.run.checkpointing import consolidate
from proximo.run.dry_run import stage_warnings
from proximo.run.journal import Journal, finish_interrupted_end, pushes_of, shown, write_outcome_of_lost
from proximo.run.memory import memory_advice
from proximo.run.options import RunOptions
from proximo.run.preflight import check_folders, check_push, inputs_of
from proximo.run.resumption import check_settings, function_sources, load_to_resume
from proximo.run.sinks import check_sinks
from proximo.run.task import Record, Task
from proximo.trainer_kinds import trainer_of
from proximo.user_code import kept_working_directory

LAST_SAVE_SECONDS = 5.0
"""How long the other ranks wait for a running save after one of them has failed."""
REPEAT_SECONDS = 2.0
"""On several ranks, a signal repeated within this time counts as the same one."""


def run_trainer(recipe: TrainerRecipe, options: RunOptions) -> int:
    """Build the task of the recipe and run it to the end; returns the exit status."""
    return run_task(lambda: trainer_of(recipe).build(recipe), recipe, options)


def run_task(build: Callable[[], Task], recipe: TrainerRecipe, options: RunOptions) -> int:
    """Build the task and run it to the end in its folder; returns the exit status.

    The folder is not touched before the task is built, so that a mistake in data or models leaves an earlier run
    in place. Every rank calls it: all build the task and take its steps, only rank 0 writes the folder.
    """
    world = current()
    num_ranks = world.size  # inside `on_rank_0` it is 1
    world.on_rank_0(
        lambda: _check(recipe, options, num_ranks=num_ranks), what="the checks of the run folder and the inputs"
    )
    if world.leads and not (options.quiet or options.keeps_process):  # a notebook shows its own view
        print(f"{trainer_of(recipe).name}: preparing models and data", file=sys.stderr, flush=True)
    world.server_logs = Path(recipe.run.folder).absolute() / SERVERS
    try:
        with kept_working_directory():
            task = build()
    finally:
        world.server_logs = None
    with closing(task), ExitStack() as opened:
        folders: list[RunFolder] = []

        def open_folder() -> tuple[Path, bool]:
            folder = opened.enter_context(
                open_run(Path(recipe.run.folder), resume=options.resume, overwrite=options.overwrite)
            )
            folders.append(folder)
            return folder.path, folder.resuming

        path, resuming = world.on_rank_0(open_folder, what="the run folder to open")
        world.traces = path / RANKS
        try:
            if num_ranks > 1:
                check_shared(path)
            return _Loop(path, task, recipe, options, resuming=resuming, folder=folders[0] if folders else None).run()
        finally:
            world.traces = None


def _check(recipe: TrainerRecipe, options: RunOptions, *, num_ranks: int) -> None:
    """Run the checks that need no model or data; raises the error of the first that fails."""
    check_folders(recipe, resume=options.resume, overwrite=options.overwrite)
    if options.resume != "never":
        store = CheckpointStore(Path(recipe.run.folder) / CHECKPOINTS)
        check_settings(store, recipe, options, num_ranks=num_ranks, functions=function_sources(recipe))
    check_sinks(recipe.run)
    check_push(recipe)
    verify_models(inputs_of(recipe))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Decision:
    """What rank 0 decides at the end of a step, from clocks, signals and the line of the step."""

    saves: bool
    metric: float | None
    """The metric that ranks the checkpoint, if there is one."""
    exit_status: int | None
    """The exit status to stop with after a signal, if one came."""
    guard: str | None
    """Why a guard ends the run here, if it does."""


def _signal_of(exit_status: int) -> str:
    """The name of the signal that a run stops with."""
    return signal.Signals(exit_status - 128).name


class _Loop:
    """The part of a run from a start to its end or interruption, on each rank."""

    def __init__(
        self,
        path: Path,
        task: Task,
        recipe: TrainerRecipe,
        options: RunOptions,
        *,
        resuming: bool,
        folder: RunFolder | None,
    ) -> None:
        """`folder`: the open run folder at `path`, on rank 0."""
        run = recipe.run
        self.world = current()
        self.folder = folder
        self.journal: Journal | None = None
        """On rank 0, from the start to the end of the steps."""
        self.resuming = resuming
        self.task = task
        self.trainer = trainer_of(recipe)
        chosen = say_precision(run.precision, task.device)
        self.notes = [*([chosen] if chosen else []), *stage_warnings(recipe), *task.notes]
        if folder is not None and folder.replaced is not None:
            self.notes.insert(0, f"the run that was in {run.folder} is now in {folder.replaced}")
        self.run_config = run
        self.options = options
        self.store = CheckpointStore(
            path / CHECKPOINTS, keep_last=run.keep_last, best="lowest" if task.best_is_lowest else "highest"
        )
        self.num_log_lines: Mapping[str, int] = {}
        self.recipe = recipe
        self.resolved = recipe.model_dump(mode="json")
        self.fingerprints = Fingerprints(
            config=relocatable(self.resolved, options.pipeline_folder),
            inputs=relocatable(task.inputs_fingerprint, options.pipeline_folder),
            environment=describe_environment(device=task.device),
            functions=function_sources(recipe),
        )
        self.status_at_end = 0
        """The exit status of a run that took all of its steps."""

    def run(self) -> int:
        first = self._restore()
        last = self.task.num_steps
        if first >= last and first > 0:
            return self.world.on_rank_0(lambda: self._nothing_to_do(first), what="the end of a finished run")
        with ExitStack() as opened:
            if self.folder is not None:
                self.journal = opened.enter_context(self._open_journal(self.folder, first, last))
            try:
                if self.journal is not None:
                    # The lack of kernels was shown while the models were built.
                    self.journal.begin(notes=self.notes, log_only=kernels_of(self.task.device).why_missing())
                return self._end(self._steps(first, last))
            except Exception as error:
                known = self.world.explain(error)
                with suppress(Exception):  # a running save needs no main thread, only living ranks
                    self.store.finish(timeout_seconds=LAST_SAVE_SECONDS if isinstance(known, RankError) else None)
                self.world.publish(known)
                if self.journal is not None:
                    self.journal.fail(known)
                if gone := self.world.lost_first():
                    write_outcome_of_lost(Path(self.run_config.folder), by=gone, reason=str(known))
                if known is not error:
                    raise known from error
                raise

    def _end(self, status: int) -> int:
        """End the run after its last step, or after a signal with this exit status; returns the status to exit with."""
        self.store.finish()
        if status == 0:
            self.world.on_rank_0(lambda: consolidate(self.store), what="the saved models to be made whole")
        if self.journal is not None:
            self.journal.end("stopped" if status else "finished", reason=_signal_of(status) if status else None)
            if status == 0 and self.journal.pushes is not None:
                self.journal.pushes.finish(self.store)
        return status or self.status_at_end

    def _open_journal(self, folder: RunFolder, first: int, last: int) -> Journal:
        journal = Journal(
            folder,
            ProgressInfo(trainer=self.trainer, total_steps=last, first_step=first),
            self.recipe,
            self.options,
            resolved=self.resolved,
            environment={**self.fingerprints.environment, "functions": self.fingerprints.functions},
            num_log_lines=self.num_log_lines,
        )
        self.world.when_stuck(journal.is_stuck)
        return journal

    def _note(self, message: str) -> None:
        if self.journal is not None:
            self.journal.progress.note(message)

    def _phase(self, name: str) -> None:
        if self.journal is not None:
            self.journal.progress.phase(name)

    def _steps(self, first: int, last: int) -> int:
        self.saved_at = time.monotonic()
        if not self.resuming:
            self._log(0, self._evaluate(0))
        with ExitStack() as entered:
            interruption = self._interruption()
            if self.world.leads:
                entered.enter_context(interruption)
            for step in range(first + 1, last + 1):
                self._phase("training")
                record = self._step(step)
                records = [record, self._evaluation_due(step)]

                def decide(step: int = step, records: Sequence[Record | None] = records) -> _Decision:
                    return self._decide(step, records, interruption)

                decision = self.world.on_rank_0(decide, what=f"the end of step {step}")
                if decision.saves:
                    self._save(step, decision.metric, keeps_all=decision.guard is not None)
                    if decision.exit_status is None and self.journal is not None and self.journal.pushes is not None:
                        self.journal.pushes.saved(self.store)
                if decision.guard is not None:
                    self._end_by_guard(step, decision.guard)
                if decision.exit_status is not None and step < last:
                    self.store.finish()
                    self._note(
                        f"stopped by {_signal_of(decision.exit_status)} after step {step}; continue with --resume"
                    )
                    return decision.exit_status
                if decision.exit_status is not None:
                    self._note(f"the signal came in step {step}, the last one: nothing is left to do")
                    self.status_at_end = decision.exit_status if self.options.more_follows else 0
        return 0

    def _interruption(self) -> Interruption:
        """Rank 0 handles signals. A scheduler sends them to all processes, and a launcher forwards them once more."""
        alone = self.world.size == 1
        return Interruption(
            grace_seconds=self.run_config.grace_seconds,
            repeat_seconds=0.0 if alone else REPEAT_SECONDS,
            before_leaving=self.world.leave_at_once,
            keeps_process=self.options.keeps_process and alone,
        )

    def _step(self, step: int) -> Record:
        """Take a step. If a guard ends the run before the step changed anything, the earlier steps are saved."""
        try:
            with kept_working_directory(), memory_advice(self.recipe.memory_settings, "training", step=step):
                return self.task.step(step)
        except GuardError as error:
            self.store.finish()
            before = step - 1
            if before and not self.world.on_rank_0(lambda: before in self.store.steps(), what="the last checkpoint"):
                self._save(before, None, keeps_all=True)
            self._end_by_guard(before, str(error))

    def _end_by_guard(self, step: int, reason: str) -> NoReturn:
        """End the run, whose state after `step` is saved. Raises TrainingError."""
        self.store.finish()
        if step:
            self._note(f"saved after step {step}")
        raise TrainingError(reason)

    def _evaluation_due(self, step: int) -> Record | None:
        every = self.run_config.evaluate_every_steps
        if step == self.task.num_steps or (every is not None and step % every == 0):
            try:
                return self._evaluate(step)
            except GuardError as error:  # the step itself is complete
                return Record(metrics={}, guard=str(error))
        return None

    def _decide(
        self,
        step: int,
        records: Sequence[Record | None],
        interruption: Interruption,
    ) -> _Decision:
        """Write the step's line, and decide on what follows."""
        metric = self._log(step, *records)
        stopping = interruption.requested
        if stopping:
            interruption.step_ended()
        due = step == self.task.num_steps or self._save_is_due(step)
        guard = next((record.guard for record in records if record is not None and record.guard is not None), None)
        # A save caused by a signal must not become the best: an uninterrupted run would not have made it.
        return _Decision(
            saves=stopping or due or guard is not None,
            metric=metric if due else None,
            exit_status=interruption.exit_status if stopping else None,
            guard=guard,
        )

    def _evaluate(self, step: int) -> Record | None:
        if not self.task.held_out:
            return None
        self._phase("evaluation")
        start = time.perf_counter()
        with kept_working_directory(), memory_advice(self.recipe.memory_settings, "evaluation", step=step):
            record = self.task.evaluate()
        if record is None:
            return None
        seconds = {"time/evaluate_seconds": Sum(time.perf_counter() - start)}
        return Record(metrics={**record.metrics, **seconds}, samples=record.samples)

    def _log(self, step: int, *records: Record | None) -> float | None:
        given = [record for record in records if record is not None]
        with kept_working_directory():  # user-defined sinks run here
            line = {} if self.journal is None else self.journal.write(step, given)
            if self.options.on_step is not None and self.world.leads and given:
                self.options.on_step(step, line)
        return None if self.task.best_metric is None else line.get(self.task.best_metric)

    def _save(self, step: int, metric: float | None, *, keeps_all: bool = False) -> None:
        if self.journal is not None:
            self.journal.sync()
        state = {
            "task": dict(self.task.state()),
            "fingerprints": self.fingerprints.to_json(),
            "num_log_lines": {} if self.journal is None else self.journal.num_log_lines,
        }
        self.store.save(step, self.task.writers(), state, metric=metric, keeps_all=keeps_all)
        self.saved_at = time.monotonic()

    def _save_is_due(self, step: int) -> bool:
        """At every multiple of the steps, and when the minutes have passed since the last save."""
        steps, minutes = self.run_config.save_every_steps, self.run_config.save_every_minutes
        by_steps = steps is not None and step % steps == 0
        return by_steps or (minutes is not None and time.monotonic() - self.saved_at >= 60 * minutes)

    def _restore(self) -> int:
        """Steps already done: 0 for a new run."""
        if not self.resuming:
            return 0
        checkpoint, notes = self.world.on_rank_0(
            lambda: load_to_resume(self.store, self.recipe, self.options, self.fingerprints),
            what="the checkpoint to be verified",
        )
        self.num_log_lines = checkpoint.state["num_log_lines"]
        self.notes += [f"going on after step {checkpoint.step}", *notes]
        self.task.restore(checkpoint)
        return checkpoint.step

    def _nothing_to_do(self, step: int) -> int:
        assert self.folder is not None
        path = shown(self.folder, self.run_config.folder, self.folder.path)
        message = f"the run in {path} is finished: step {step} of {self.task.num_steps}"
        if step > self.task.num_steps:
            message = f"the run in {path} is at step {step}, beyond the {self.task.num_steps} steps of the recipe"
        if self.options.resume == "must":
            raise RunFolderError(
                f"{message}, so --resume would train nothing; raise the number of steps, or use --resume=auto "
                "where a finished run is fine"
            )
        self.store.tidy()
        consolidate(self.store)
        finish_interrupted_end(self.folder, total_steps=self.task.num_steps)
        info = ProgressInfo(trainer=self.trainer, total_steps=step, first_step=step)
        with closing(open_progress(info, quiet=self.options.quiet)) as progress:
            progress.note(message)
            if pushes := pushes_of(self.run_config, self.folder, progress):
                pushes.finish(self.store)
        return 0
