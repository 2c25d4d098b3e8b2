"""What a run changed: its first measurement beside its last. Not the curve between them.

Held-out figures are used where there are any, since they compare the same prompts; else those of training.
"""

from dataclasses import dataclass

from proximo.metrics.catalogue import catalogue
from proximo.metrics.definitions import Better
from proximo.metrics.run_files import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class BeforeAfter:
    """One figure, at the first and at the last step that has it; `before` is None where those are one step."""

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
        """False for a figure of training, whose steps have prompts of their own."""
        return self.name.startswith("evaluation/")

    @property
    def improved(self) -> bool | None:
        """None where neither way is better, or nothing moved."""
        if self.better is None or self.before is None or self.before == self.after:
            return None
        return (self.after > self.before) is (self.better is Better.UP)


def before_after(run: Run) -> tuple[BeforeAfter, ...]:
    """The figures of the run's trainer that it has measured."""
    if run.trainer is None:
        return ()
    rows = (_row(run, label, names) for label, names in run.trainer.metrics.before_after.items())
    return tuple(row for row in rows if row is not None)


def _row(run: Run, label: str, names: tuple[str, ...]) -> BeforeAfter | None:
    found = [(name, run.series(name)) for name in names if len(run.series(name))]
    if not found:
        return None
    name, series = next(((name, series) for name, series in found if len(series) > 1), found[0])
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
