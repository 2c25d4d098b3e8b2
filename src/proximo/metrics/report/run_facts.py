"""The facts at the top of a report: model, task, device, duration, outcome."""

from collections.abc import Mapping, Sequence
from typing import Any

from proximo.message_text import count_of
from proximo.metrics.catalogue import trainer_by_metrics
from proximo.metrics.formatting import format_duration
from proximo.metrics.run_files import Run, setting
from proximo.trainer_kinds import TrainerKind

TIMED = ("time/step_seconds", "time/evaluate_seconds")
PUSH_FAILURES = "progress/push_failures"


def facts(run: Run) -> tuple[tuple[str, str], ...]:
    """(label, text) of each fact that the run's files contain."""
    trainer = trainer_by_metrics(run.names)
    entries = {
        "Model": model_of(run.config),
        "Task": task_of(run.config, trainer) if trainer else "",
        "Device": _device(run),
        "Duration": _duration(run),
        "Outcome": "; ".join(filter(None, (outcome_words(run), _push_failures(run)))),
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


def _push_failures(run: Run) -> str:
    """How many pushes to the Hub failed, and what is missing there; empty if none failed."""
    ended = run.outcome
    count = int(sum(run.series(PUSH_FAILURES).values)) + (ended.push_failures if ended else 0)
    failed = f"{count_of(count, 'push', 'pushes')} to the Hub failed" if count else ""
    lacking = f"not pushed: {ended.not_pushed}" if ended and ended.not_pushed else ""
    return "; ".join(filter(None, (failed, lacking)))


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
