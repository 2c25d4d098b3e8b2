"""The contents of a page that compares runs: what differs, their figures, alarms, curves and answers side by side."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from proximo.errors import redacted
from proximo.metrics.alarms import Alarm
from proximo.metrics.catalogue import trainer_by_metrics
from proximo.metrics.definitions import Section, Trace
from proximo.metrics.report.page import rendered
from proximo.metrics.report.run_summary import BeforeAfter, before_after, facts, pair_samples
from proximo.metrics.report.views import (
    LONG_ENOUGH_FOR_ALARMS,
    SAMPLES_FOLDED,
    SAMPLES_SHOWN,
    Card,
    Tile,
    run_alarms,
    tile,
)
from proximo.metrics.run_files import Run, Sample
from proximo.trainer_kinds import TrainerKind

if TYPE_CHECKING:
    from proximo.metrics.report.plots import Line

OWN_FOLDER = "run.folder"
"""The setting that always differs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedRun:
    """A run that is compared, with its name and its number of a colour."""

    label: str
    colour: int
    run: Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """A run in the page."""

    label: str
    colour: int
    failure: str | None
    alarms: tuple[Alarm, ...]
    long_enough_for_alarms: bool


@dataclass(frozen=True, slots=True)
class TextRow:
    """A row of a table: its name, and the text of each run; None where a run has none."""

    name: str
    cells: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class FigureRow:
    """A headline metric of each run; None where a run has not recorded it."""

    name: str
    unit: str
    cells: tuple[Tile | None, ...]


@dataclass(frozen=True, slots=True)
class SideBySide:
    """One prompt with the last answer of each run that has one."""

    prompt: str
    answers: tuple[tuple[Compared, Sample], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Runs of one trainer that are compared with each other."""

    title: str
    runs: tuple[Compared, ...]
    facts: tuple[TextRow, ...]
    settings: tuple[TextRow, ...]
    environment: tuple[TextRow, ...]
    figures: tuple[FigureRow, ...]
    cards: Mapping[Section, tuple[Card, ...]]
    samples: tuple[SideBySide, ...]
    num_samples: int


def comparison_page(runs: Sequence[NamedRun]) -> str:
    """The HTML of a page that compares the runs. The same runs give the same bytes."""
    labels = [run.label for run in runs]
    return rendered(
        "comparison.html.jinja",
        title=f"{', '.join(labels[:-1])} and {labels[-1]}",
        comparison=compared(runs),
        samples_shown=SAMPLES_SHOWN,
    )


def compared(runs: Sequence[NamedRun]) -> Comparison:
    """The comparison of at least two runs of one trainer, with metrics."""
    trainer = trainer_by_metrics(runs[0].run.names)
    assert trainer is not None
    heads = tuple(_compared(run) for run in runs)
    samples = _side_by_side(runs, heads)
    configs = [dict(_leaves(run.run.config or {})) for run in runs]
    environments = [dict(_leaves(run.run.environment or {})) for run in runs]
    return Comparison(
        title=trainer.title,
        runs=heads,
        facts=_text_rows([dict(facts(run.run)) for run in runs]),
        settings=tuple(row for row in differing(configs) if row.name != OWN_FOLDER),
        environment=differing(environments),
        figures=tuple(_figures(runs)),
        cards=_cards(runs, trainer),
        samples=samples[: SAMPLES_SHOWN + SAMPLES_FOLDED],
        num_samples=len(samples),
    )


def differing(values: Sequence[Mapping[str, str]]) -> tuple[TextRow, ...]:
    """The rows whose values are not the same in all runs."""
    return tuple(row for row in _text_rows(values) if len(set(row.cells)) > 1)


def _text_rows(values: Sequence[Mapping[str, str]]) -> tuple[TextRow, ...]:
    names = dict.fromkeys(name for each in values for name in each)
    return tuple(TextRow(name, tuple(each.get(name) for each in values)) for name in names)


def _leaves(values: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    items = values.items() if isinstance(values, Mapping) else enumerate(values) if isinstance(values, list) else ()
    for key, value in items:
        if isinstance(value, Mapping | list) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", redacted(value if isinstance(value, str) else json.dumps(value))


def _compared(run: NamedRun) -> Compared:
    outcome = run.run.outcome
    return Compared(
        label=run.label,
        colour=run.colour,
        failure=outcome.reason or "no reason given" if outcome and outcome.state == "failed" else None,
        alarms=run_alarms(run.run),
        long_enough_for_alarms=len(run.run.lines) >= LONG_ENOUGH_FOR_ALARMS,
    )


def _figures(runs: Sequence[NamedRun]) -> Iterator[FigureRow]:
    measured = [{row.name: row for row in before_after(run.run)} for run in runs]
    for name in dict.fromkeys(name for rows in measured for name in rows):
        found: list[BeforeAfter | None] = [rows.get(name) for rows in measured]
        first = next(row for row in found if row is not None)
        label = first.label if first.same_prompts else f"{first.label}, training"
        yield FigureRow(label, tile(first).unit, tuple(None if row is None else tile(row) for row in found))


def _cards(runs: Sequence[NamedRun], trainer: TrainerKind) -> dict[Section, tuple[Card, ...]]:
    """One plot for each metric, with a line for each run that has it."""
    from proximo.metrics.report.plots import draw_lines, expanded

    names = list(dict.fromkeys(name for run in runs for name in run.run.names))
    cards: dict[Section, list[Card]] = {section: [] for section in Section}
    drawn: set[str] = set()
    for curve in trainer.metrics.curves:
        traces = [trace for trace in expanded(curve.traces, names) if trace.name in names]
        for trace in traces:
            lines = _lines(runs, trace)
            section = Section.MORE if curve.stacked else curve.section
            if trace.name in drawn or not lines or (section is Section.MORE and _is_constant(lines)):
                continue
            drawn.add(trace.name)
            plot = draw_lines(replace(curve, stacked=False), lines, key=f"c{len(drawn)}")
            title = curve.title if len(traces) == 1 else f"{curve.title}: {trace.label}"
            cards[section].append(Card(title=title, unit=curve.unit, healthy=curve.healthy, plot=plot))
    return {section: tuple(found) for section, found in cards.items()}


def _lines(runs: Sequence[NamedRun], trace: Trace) -> "list[Line]":
    from proximo.metrics.report.plots import Line

    recorded = [(run, run.run.series(trace.name)) for run in runs]
    return [
        Line(label=run.label, colour=run.colour, series=series, style=trace.style)
        for run, series in recorded
        if len(series)
    ]


def _is_constant(lines: "Sequence[Line]") -> bool:
    return len({value for line in lines for value in line.series.values}) == 1


def _side_by_side(runs: Sequence[NamedRun], heads: Sequence[Compared]) -> tuple[SideBySide, ...]:
    """The prompts that several runs have answered, in the order of the first that has them; the last answers."""
    answers: list[dict[str, Sample]] = []
    for run in runs:
        newest: dict[str, Sample] = {}
        for pair in pair_samples(run.run):
            sample = pair.after or pair.before
            if sample is not None:
                newest.setdefault(pair.prompt, sample)
        answers.append(newest)
    found = (
        SideBySide(
            prompt, tuple((head, each[prompt]) for head, each in zip(heads, answers, strict=True) if prompt in each)
        )
        for prompt in dict.fromkeys(prompt for each in answers for prompt in each)
    )
    return tuple(each for each in found if len(each.answers) > 1)
