"""What reports and tables say of a run: its facts, its main metrics before and after, and its answers in pairs."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from proximo.message_text import count_of, format_change, format_duration, format_number
from proximo.metrics.catalogue import catalogue, trainer_by_metrics
from proximo.metrics.definitions import Better
from proximo.metrics.run_files import Run, Sample, setting
from proximo.trainer_kinds import TrainerKind

TIMED = ("time/step_seconds", "time/evaluate_seconds")


def facts(run: Run) -> tuple[tuple[str, str], ...]:
    """(label, text) of each fact that the run's files contain."""
    trainer = trainer_by_metrics(run.names)
    entries = {
        "Model": model_of(run.config),
        "Task": task_of(run.config, trainer) if trainer else "",
        "Device": _device(run),
        "Duration": _duration(run),
        "Outcome": outcome_words(run),
    }
    return tuple((label, text) for label, text in entries.items() if text)


def model_of(config: Mapping[str, Any] | None) -> str:
    """The model that training starts from; empty if the configuration does not name it."""
    model = setting(config, "model")
    if model is None:
        return ""
    start = model.get("path") or f"a random {setting(model, 'config', 'model_type')}"
    rank = setting(model, "lora", "rank")
    return f"{start}, with LoRA of rank {rank}" if rank else str(start)


def task_of(config: Mapping[str, Any] | None, trainer: TrainerKind) -> str:
    """The model, its data, and its rewards."""
    data = _named(setting(config, "data", "sources"))
    rewards = _named(setting(config, "reward"))
    estimator = setting(config, trainer.name, "advantage", "kind")
    task = trainer.task
    name = task[:1].upper() + task[1:] + (f" ({estimator})" if estimator else "")
    return name + (f" on {data}" if data else "") + (f", rewarded by {rewards}" if rewards else "")


def _named(sources: object) -> str:
    """Names of data or reward sources, separated by commas."""
    if not isinstance(sources, Sequence):
        return ""
    return ", ".join(
        str(source.get("path") or source.get("function") or source.get("verifier_class") or source.get("name"))
        for source in sources
        if isinstance(source, Mapping)
    )


def _device(run: Run) -> str:
    environment = run.environment or {}
    hardware = environment.get("accelerator") or environment.get("processor")
    threads, precision = environment.get("num_threads"), setting(run.config, "run", "precision")
    parts = [
        environment.get("device"),
        hardware,
        count_of(threads, "thread") if threads else None,
        precision,
    ]
    return ", ".join(str(part) for part in parts if part)


def _duration(run: Run) -> str:
    seconds = sum(sum(run.series(name).values) for name in TIMED)
    return f"{format_duration(seconds)} of steps and evaluations" if seconds else ""


def outcome_words(run: Run) -> str:
    """How the run ended, or how far it has come."""
    done = "before the first step" if not run.last_step else f"after step {run.last_step:,}"
    of = f" of {run.total_steps:,}" if run.last_step and run.total_steps else ""
    match run.outcome.state if run.outcome else None:
        case None:
            return f"running, or killed, {done}{of}"
        case "stopped":
            return f"stopped by {(run.outcome and run.outcome.reason) or 'a signal'} {done}{of}; --resume continues it"
        case "finished" if run.outcome and run.outcome.reason:
            return f"finished {done}{of}, but {run.outcome.reason}"
        case state:
            return f"{state} {done}{of}"


@dataclass(frozen=True, kw_only=True, slots=True)
class BeforeAfter:
    """One metric at the first and at the last step that has it; `before` is None if there is only one such step."""

    label: str
    name: str
    unit: str
    better: Better | None
    before: float | None
    after: float
    first_step: int
    last_step: int

    @property
    def same_prompts(self) -> bool:
        """False for training metrics, because every training step has other prompts."""
        return self.name.startswith("evaluation/")

    @property
    def verdict(self) -> str:
        """`better` or `worse`; empty if no direction is better, or nothing changed."""
        if self.better is None or self.before is None or self.before == self.after:
            return ""
        return "better" if (self.after > self.before) is (self.better is Better.UP) else "worse"

    @property
    def shown_before(self) -> str:
        return "" if self.before is None else format_number(self.before, self.unit)

    @property
    def shown_after(self) -> str:
        return format_number(self.after, self.unit)

    @property
    def change(self) -> str:
        """The difference with its sign; empty without a value before."""
        return format_change(self.before, self.after)


def before_after(run: Run) -> tuple[BeforeAfter, ...]:
    """The main metrics of the run's trainer that the run has recorded."""
    trainer = trainer_by_metrics(run.names)
    if trainer is None:
        return ()
    rows = (_row(run, label, names) for label, names in trainer.metrics.before_after.items())
    return tuple(row for row in rows if row is not None)


def _row(run: Run, label: str, names: tuple[str, ...]) -> BeforeAfter | None:
    recorded = [(name, run.series(name)) for name in names if len(run.series(name))]
    if not recorded:
        return None
    name, series = next(((name, series) for name, series in recorded if len(series) > 1), recorded[0])
    metric = catalogue().find(name)
    return BeforeAfter(
        label=label,
        name=name,
        unit=metric.unit,
        better=metric.better,
        before=series.values[0] if len(series) > 1 else None,
        after=series.values[-1],
        first_step=series.steps[0],
        last_step=series.steps[-1],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplePair:
    """One prompt with its responses at the first and at the last evaluation."""

    prompt: str
    before: Sample | None
    after: Sample | None


def pair_samples(run: Run) -> tuple[SamplePair, ...]:
    """Held-out responses in the order of the first evaluation, or without evaluations the newest training samples.

    Prompts take turns: the first responses of all prompts come before the second ones. With a single evaluation, or
    training samples, one side of each pair is None.
    """
    samples = run.samples
    if not samples.first_evaluation:
        return tuple(_alone(sample) for sample in _in_turns(reversed(samples.training)))
    if not samples.last_evaluation:
        return tuple(_alone(sample) for sample in _in_turns(samples.first_evaluation))
    unpaired: defaultdict[str, list[Sample]] = defaultdict(list)
    for sample in reversed(samples.last_evaluation):
        unpaired[sample.prompt_id].append(sample)
    return tuple(
        SamplePair(
            prompt=sample.prompt,
            before=sample,
            after=unpaired[sample.prompt_id].pop() if unpaired[sample.prompt_id] else None,
        )
        for sample in _in_turns(samples.first_evaluation)
    )


def _in_turns(samples: Iterable[Sample]) -> list[Sample]:
    """Round robin over prompts: the first samples of all prompts, then the second ones, each in their order."""
    turns: defaultdict[str, count[int]] = defaultdict(count)
    return sorted(samples, key=lambda sample: next(turns[sample.prompt_id]))


def _alone(sample: Sample) -> SamplePair:
    if sample.step == 0:
        return SamplePair(prompt=sample.prompt, before=sample, after=None)
    return SamplePair(prompt=sample.prompt, before=None, after=sample)
