"""Compares the first and last measurement of a run's main metrics.

Prefers held-out metrics, since they compare the same prompts; training metrics are the fallback.
"""

from dataclasses import dataclass

from proximo.metrics.catalogue import catalogue, trainer_by_metrics
from proximo.metrics.definitions import Better
from proximo.metrics.run_files import Run


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
    def improved(self) -> bool | None:
        """Whether the change is for the better; None if no direction is better, or nothing changed."""
        if self.better is None or self.before is None or self.before == self.after:
            return None
        return (self.after > self.before) is (self.better is Better.UP)


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
