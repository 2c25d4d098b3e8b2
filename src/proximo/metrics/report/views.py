"""The contents of a report as plain values for the template, with drawn curves."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING

from ruamel.yaml import YAML

from proximo.errors import redacted
from proximo.message_text import format_change, format_number
from proximo.metrics.alarms import Alarm, find_alarms
from proximo.metrics.catalogue import catalogue, trainer_by_metrics
from proximo.metrics.definitions import Curve, Section
from proximo.metrics.report.run_summary import BeforeAfter, SamplePair, before_after, facts, pair_samples
from proximo.metrics.run_files import Run, Sample, ScoredPair
from proximo.metrics.shared_declarations import NO_UPDATE

if TYPE_CHECKING:  # a run draws nothing before its end, and importing matplotlib would delay its first step
    from proximo.metrics.report.plots import Plot

UNTITLED = "Run"
"""The title of a stage whose trainer is unknown."""
UNITS_NOT_SHOWN = ("score", "fraction", "bits", "perplexity")
SAMPLES_SHOWN, SAMPLES_FOLDED, PAIRS_SHOWN = 6, 54, 6
LONG_ENOUGH_FOR_ALARMS = 5
"""Lines of metrics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """One headline figure at the top of the report."""

    label: str
    unit: str
    before: str | None
    after: str
    change: str
    verdict: str
    """`better`, `worse`, or empty if no direction is better."""


@dataclass(frozen=True, slots=True)
class Headline:
    """A headline figure of a pipeline and its stage."""

    stage: str
    tile: Tile


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """One plot with its explanation."""

    title: str
    unit: str
    healthy: str
    plot: "Plot"


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric in the table of all metrics."""

    name: str
    last: str
    unit: str
    definition: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """The contents of the report about one run."""

    key: str
    short_title: str
    title: str
    num_headlines: int
    """How many of its figures are shown at the top of a pipeline's report."""
    facts: tuple[tuple[str, str], ...]
    """(label, text) of model, task, device, duration and outcome."""
    failure: str | None
    """Why the run failed; None if it did not."""
    last_step: int | None
    first_evaluation: int | None
    last_evaluation: int | None
    num_unreadable: int
    tiles: tuple[Tile, ...]
    long_enough_for_alarms: bool
    """True if the run has enough steps for the alarm rules."""
    alarms: tuple[Alarm, ...]
    cards: dict[Section, tuple[Card, ...]]
    samples: tuple[SamplePair, ...]
    num_samples: int
    pairs: tuple[ScoredPair, ...]
    num_pairs: int
    metrics: tuple[MetricRow, ...]
    config: str | None
    environment: str | None


def stage_view(run: Run, *, key: str) -> Stage:
    """The view of a run. `key` must be unique among the stages of a page."""
    samples, pairs = pair_samples(run), sorted(run.samples.pairs, key=lambda pair: pair.margin)
    trainer = trainer_by_metrics(run.names)
    return Stage(
        key=key,
        short_title=trainer.short_title if trainer else UNTITLED,
        title=trainer.title if trainer else UNTITLED,
        num_headlines=trainer.metrics.num_headlines if trainer else 1,
        facts=facts(run),
        failure=run.outcome.reason or "no reason given" if run.outcome and run.outcome.state == "failed" else None,
        last_step=run.last_step,
        first_evaluation=_step(run.samples.first_evaluation),
        last_evaluation=_step(run.samples.last_evaluation),
        num_unreadable=run.num_unreadable + run.samples.num_unreadable,
        tiles=tuple(tile(row) for row in before_after(run)),
        long_enough_for_alarms=len(run.lines) >= LONG_ENOUGH_FOR_ALARMS,
        alarms=run_alarms(run),
        cards={section: tuple(_cards(run, section, key)) for section in Section},
        samples=samples[: SAMPLES_SHOWN + SAMPLES_FOLDED],
        num_samples=len(samples),
        pairs=_extreme_pairs(pairs),
        num_pairs=len(pairs),
        metrics=tuple(_metric_row(run, name) for name in run.names if catalogue().get(name)),
        config=_as_yaml(run.config),
        environment=_as_yaml(run.environment),
    )


def newest(run: Run) -> tuple[Sample, ...]:
    """The newest answers of training, newest first."""
    return tuple(reversed(run.samples.training[-SAMPLES_SHOWN:]))


def run_alarms(run: Run) -> tuple[Alarm, ...]:
    """Alarms of the run by its trainer's rules; empty if the run has recorded nothing."""
    trainer = trainer_by_metrics(run.names)
    return find_alarms(run, trainer.metrics.rules) if trainer else ()


def without_update(run: Run) -> str | None:
    """Why a run that took all of its steps took no update, or none any more; None if it did."""
    found = (each for alarm in run_alarms(run) for each in (alarm, *alarm.consequences))
    return next(
        (f"{NO_UPDATE[0].lower()}{NO_UPDATE[1:]}: {each.detail}" for each in found if each.title == NO_UPDATE), None
    )


def headlines(stages: Sequence[Stage]) -> tuple[Headline, ...]:
    """The headline figures of all stages, for a pipeline's report."""
    return tuple(Headline(stage.short_title, tile) for stage in stages for tile in stage.tiles[: stage.num_headlines])


def _step(samples: tuple[Sample, ...]) -> int | None:
    return samples[0].step if samples else None


def tile(row: BeforeAfter) -> Tile:
    """The figure of a measured metric."""
    return Tile(
        label=row.label,
        unit="" if row.unit in UNITS_NOT_SHOWN else row.unit,
        before=None if row.before is None else format_number(row.before, row.unit),
        after=format_number(row.after, row.unit),
        change=format_change(row.before, row.after),
        verdict={True: "better", False: "worse", None: ""}[row.improved],
    )


def _cards(run: Run, section: Section, stage: str) -> Iterator[Card]:
    from proximo.metrics.report.plots import draw_curve

    trainer = trainer_by_metrics(run.names)
    curves = trainer.metrics.curves if trainer else ()
    for curve in curves:
        plot = draw_curve(curve, run, key=f"{stage}-{curve.key}") if _belongs(curve, run, section) else None
        if plot is not None:
            yield Card(title=curve.title, unit=curve.unit, healthy=curve.healthy, plot=plot)


def _belongs(curve: Curve, run: Run, section: Section) -> bool:
    """Whether to show the curve in this section.

    Constant metrics, such as a fixed coefficient, are left out of MORE.
    """
    values = {value for trace in curve.traces for value in run.series(trace.name).values}
    return curve.section is section and (section is not Section.MORE or len(values) != 1 or len(run.lines) == 1)


def _extreme_pairs(pairs: list[ScoredPair]) -> tuple[ScoredPair, ...]:
    """The pairs with the lowest and the highest margins, which show best what a reward model looks at."""
    if len(pairs) <= PAIRS_SHOWN:
        return tuple(pairs)
    half = PAIRS_SHOWN // 2
    return (*pairs[:half], *pairs[-half:])


def _metric_row(run: Run, name: str) -> MetricRow:
    metric = catalogue().find(name)
    return MetricRow(name, format_number(run.series(name).values[-1], metric.unit), metric.unit, metric.definition)


def _as_yaml(values: object) -> str | None:
    """Values as YAML, with possible secrets in addresses removed, since reports are shared."""
    if values is None:
        return None
    yaml, written = YAML(typ="safe", pure=True), StringIO()
    yaml.default_flow_style, yaml.sort_base_mapping_type_on_output, yaml.width = False, False, 100
    yaml.dump(values, written)
    return redacted(written.getvalue())
