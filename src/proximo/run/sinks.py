"""Sinks of a run: each gets each step once, and its failures do not end the run. One raises alarms."""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from proximo.checkpoint import atomic
from proximo.config.run import RunConfig
from proximo.config.sinks import FunctionSinkConfig, SinkConfig
from proximo.errors import ConfigError, UserError, redacted
from proximo.message_text import count_of
from proximo.metrics.alarms import find_alarms
from proximo.metrics.catalogue import catalogue
from proximo.metrics.console import ProgressInfo
from proximo.metrics.run_files import Run
from proximo.metrics.sinks import SampleSink, Sink, TrackedRun, WandbSink, history
from proximo.rewards.function_binding import import_function
from proximo.user_code import kept_working_directory
from proximo_verifiers.callables import calling_problem, methods_problem

SINK_METHODS = ("write(step, metrics)", "close()")
SAMPLES_METHOD = "write_samples(step, samples)"
"""A method that a sink may have."""
MOST_FAILURES_IN_A_ROW = 3
"""After this many failures in a row a sink is turned off: an unreachable tracker costs a timeout per step."""
CHECKS_PER_RUN = 50
"""After n steps, the rules are checked every n / CHECKS_PER_RUN steps (every step at first), cheap in long runs."""

OpenSink = Callable[[TrackedRun], Sink]


@dataclass(frozen=True, slots=True)
class _Memory:
    """State of a sink that a resumed run needs."""

    id: str
    last_step: int


class GuardedSink:
    """Sends each step to a sink at most once, across restarts of the run, and counts its failures.

    The last step sent is saved in the run folder: written before the line is sent, and restored if sending fails.
    Steps that a resume repeats are not sent again; steps in metrics.jsonl that the sink never got (it failed, or was
    added later) are sent when it is opened.
    """

    def __init__(
        self,
        label: str,
        open_sink: OpenSink,
        *,
        folder: Path,
        name: str,
        config: Mapping[str, Any],
        metrics_file: Path,
        warn: Callable[[str], None],
        samples: bool = True,
    ) -> None:
        """`samples`: whether to send samples to a sink that takes them."""
        self.label = label
        self._samples = samples
        self.num_failures = 0
        self._warn = warn
        self._in_a_row = 0
        self._written = -1
        self._file = folder / f"{label.replace(':', '-')}.json"
        self._memory = self._remembered() or _Memory(id=secrets.token_hex(16), last_step=-1)
        self._sink: Sink | None = None
        try:
            atomic.make_folder(folder)
            self._sink = open_sink(TrackedRun(id=self._memory.id, name=name, folder=folder, config=config))
        except UserError:
            raise
        except Exception as error:  # a tracker may raise anything, and metrics.jsonl has every number
            self._failed(error)
            self._warn(f"{label} could not be opened and gets no line in this process")
        for step, metrics in history(metrics_file):
            self.write(step, {key: number for key, number in metrics.items() if number is not None})

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        before = self._memory
        if step <= before.last_step:
            return
        if self._sink is None:
            self.num_failures += 1
            return
        try:
            self._remember(_Memory(id=before.id, last_step=step))
            self._sink.write(step, metrics)
        except Exception as error:
            with suppress(OSError):
                self._remember(before)
            self._failed(error)
            self._in_a_row += 1
            if self._in_a_row == MOST_FAILURES_IN_A_ROW:
                self._warn(
                    f"{self.label} failed {self._in_a_row} times in a row and gets no more lines in this process"
                )
                self._close()
        else:
            self._in_a_row = 0
            self._written = step

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Send samples of a step, after its metrics, to a sink that takes samples and accepted the metrics."""
        if not (samples and self._samples and step == self._written and isinstance(self._sink, SampleSink)):
            return
        try:
            self._sink.write_samples(step, samples)
        except Exception as error:
            self._failed(error)

    def close(self) -> None:
        self._close()
        if self.num_failures:
            self._warn(f"{self.label} failed {count_of(self.num_failures, 'time')}; metrics.jsonl has every line")

    def _close(self) -> None:
        sink, self._sink = self._sink, None
        try:
            if sink is not None:
                sink.close()
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        self.num_failures += 1
        if self.num_failures == 1:
            self._warn(
                f"{self.label} failed, and the run continues ({type(error).__name__}: {redacted(str(error))[:300]})"
            )

    def _remembered(self) -> _Memory | None:
        if not self._file.is_file():
            return None
        try:
            return _Memory(**json.loads(self._file.read_bytes()))
        except (OSError, TypeError, ValueError) as error:
            self._warn(f"{self._file} cannot be read ({error}): {self.label} begins a new run, with every step")
            return None

    def _remember(self, memory: _Memory) -> None:
        self._memory = memory
        atomic.write_bytes_atomically(self._file, json.dumps(asdict(memory)).encode())


def open_sinks(
    run: RunConfig, config: Mapping[str, Any], *, folder: Path, metrics_file: Path, warn: Callable[[str], None]
) -> list[GuardedSink]:
    """The sinks of `run.sinks`, caught up with metrics.jsonl. Raises ConfigError for an invalid function."""
    return [
        GuardedSink(
            sink.label,
            _opener(sink),
            folder=folder,
            name=sink.name or run.folder,
            config=config,
            metrics_file=metrics_file,
            warn=warn,
            samples=isinstance(sink, FunctionSinkConfig) or sink.samples,
        )
        for sink in run.sinks
    ]


def _opener(config: SinkConfig) -> OpenSink:
    if isinstance(config, FunctionSinkConfig):
        return _user_sink(config)
    return lambda run: WandbSink(run, project=config.project)


def check_sinks(run: RunConfig) -> None:
    """Raises ConfigError if one of `run.sinks` cannot be opened. Servers are not contacted."""
    for index, sink in enumerate(run.sinks):
        if problem := _sink_problem(sink):
            raise ConfigError(f"run.sinks.{index}: {problem}")


def _sink_problem(sink: SinkConfig) -> str | None:
    if not isinstance(sink, FunctionSinkConfig):
        return WandbSink.problem()
    problem = calling_problem(import_function(sink.function), [None], sink.kwargs)
    given = "".join(f", {key}=..." for key in sink.kwargs)
    return problem and f"{sink.function} is called as function(run{given}), but {problem}"


def _user_sink(config: FunctionSinkConfig) -> OpenSink:
    function = import_function(config.function)

    def open_sink(run: TrackedRun) -> Sink:
        with kept_working_directory():
            sink = function(run, **config.kwargs)
        more = (SAMPLES_METHOD,) if hasattr(sink, "write_samples") else ()
        if problem := methods_problem(sink, (*SINK_METHODS, *more)):
            raise ConfigError(
                f"{config.function} must return a sink, which has {' and '.join(SINK_METHODS)}, but {problem}"
            )
        return sink

    return open_sink


class AlarmWatch:
    """A sink that checks the steps by the rules of the report, and reports each alarm once, when it is first raised.

    `metrics_file` holds the steps before this process. Alarms of those steps were reported by the earlier process and
    are not repeated.
    """

    def __init__(
        self,
        info: ProgressInfo,
        settings: Mapping[str, Any],
        *,
        metrics_file: Path,
        report: Callable[[str], None],
    ) -> None:
        self._rules = info.trainer.metrics.rules
        self._settings = settings
        self._total_steps = info.total_steps
        self._report = report
        self._lines = [_repeatable(step, metrics) for step, metrics in history(metrics_file)]
        self._num_checked = len(self._lines)
        self._reported = {alarm.title for alarm in find_alarms(self._run(), self._rules)}

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of one step, and report alarms that are new."""
        self._lines.append(_repeatable(step, metrics))
        count = len(self._lines)
        if step < self._total_steps and count - self._num_checked < count // CHECKS_PER_RUN:
            return
        self._num_checked = count
        for alarm in find_alarms(self._run(), self._rules):
            if alarm.title not in self._reported:
                self._reported.add(alarm.title)
                self._report(f"step {step}, {alarm.severity}: {alarm.text}")

    def close(self) -> None: ...

    def _run(self) -> Run:
        lines = tuple(self._lines)
        return Run(name="", lines=lines, config=self._settings, total_steps=self._total_steps)


def _repeatable(step: int, metrics: Mapping[str, float | None]) -> dict[str, float]:
    """The step's metrics without times and memory: an alarm must not depend on the load of the machine."""
    numbers = {name: number for name, number in metrics.items() if number is not None}
    return {"step": step, **catalogue().repeatable(numbers)}
