"""The contents of a page that compares runs: what differs, their figures, alarms, curves and answers side by side."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from proximo.errors import redacted
from proximo.metrics.catalogue import trainer_by_metrics
from proximo.metrics.definitions import Section, Trace
from proximo.metrics.report.page import rendered
from proximo.metrics.report.run_summary import BeforeAfter, before_after, facts, pair_samples
from proximo.metrics.report.views import Card
from proximo.metrics.run_files import Run, Sample, setting
from proximo.trainer_kinds import TrainerKind

if TYPE_CHECKING:
    from proximo.metrics.report.plots import Line

Cell = TypeVar("Cell")
OWN_FOLDER = "run.folder"
"""The setting that always differs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedRun:
    """A run that is compared, with its name and its number of a colour."""

    label: str
    colour: int
    run: Run
    is_stage: bool = False
    """Whether it is a stage of a pipeline, which starts from other stages in the same folder."""

    @property
    def place(self) -> str:
        """Its name, of a stage with that of the pipeline."""
        return f"{self.label}/{self.run.name}" if self.is_stage else self.label


@dataclass(frozen=True, slots=True)
class Row(Generic[Cell]):
    """A row of a table with the cell of each run; None where a run has none."""

    name: str
    cells: tuple[Cell | None, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Runs that are compared with each other; of pipelines, one for each kind of stage."""

    key: str
    title: str
    same_kind: bool
    """Whether one trainer made all of them."""
    runs: Sequence[NamedRun]
    facts: tuple[Row[str], ...]
    settings: tuple[Row[str], ...]
    environment: tuple[Row[str], ...]
    figures: tuple[Row[BeforeAfter], ...]
    cards: Mapping[Section, tuple[Card, ...]]
    samples: tuple[Row[Sample], ...]
    """By prompt, the last answer of each run that has one."""


def comparison_page(groups: Sequence[Sequence[NamedRun]]) -> str:
    """The HTML of a page that compares the runs of each group. The same runs give the same bytes."""
    labels = list(dict.fromkeys(run.label for group in groups for run in group))
    return rendered(
        "comparison.html.jinja",
        title=f"{', '.join(labels[:-1])} and {labels[-1]}",
        comparisons=[compared(group, key=f"s{number}") for number, group in enumerate(groups, 1)],
    )


def compared(runs: Sequence[NamedRun], *, key: str) -> Comparison:
    """The comparison of at least two runs with metrics. `key` must be unique in the page.

    Runs of different trainers are compared in what at least two of them have.
    """
    recognised = (trainer_by_metrics(run.run.names) for run in runs)
    trainers = list(dict.fromkeys(trainer for trainer in recognised if trainer is not None))
    same_kind = len(trainers) == 1
    configs = [_settings(run) for run in runs]
    environments = [dict(_leaves(run.run.environment or {})) for run in runs]
    return Comparison(
        key=key,
        title=trainers[0].title if same_kind else " and ".join(each.short_title for each in trainers),
        same_kind=same_kind,
        runs=runs,
        facts=_text_rows([dict(facts(run.run)) for run in runs]),
        settings=differing(configs, shared_only=not same_kind),
        environment=differing(environments, shared_only=False),
        figures=tuple(_figures(runs, fewest=1 if same_kind else 2)),
        cards=_cards(runs, trainers, fewest=1 if same_kind else 2, key=key),
        samples=_side_by_side(runs),
    )


def differing(values: Sequence[Mapping[str, str]], *, shared_only: bool) -> tuple[Row[str], ...]:
    """The rows whose values are not the same in all runs. `shared_only`: without those that a run does not have."""
    rows = (row for row in _text_rows(values) if len(set(row.cells)) > 1)
    return tuple(row for row in rows if not shared_only or None not in row.cells)


def _text_rows(values: Sequence[Mapping[str, str]]) -> tuple[Row[str], ...]:
    names = dict.fromkeys(name for each in values for name in each)
    return tuple(Row(name, tuple(each.get(name) for each in values)) for name in names)


def _settings(run: NamedRun) -> dict[str, str]:
    """Dotted key -> value as text. The folder of a pipeline is `.` in the paths of its stages, which begin with it."""
    leaves = dict(_leaves(run.run.config or {}))
    pipeline, slash, _ = str(setting(run.run.config, "run", "folder") or "").rpartition("/")
    leaves.pop(OWN_FOLDER, None)
    if not (run.is_stage and slash):
        return leaves
    return {
        key: f".{text[len(pipeline) :]}" if text.startswith(f"{pipeline}/") else text for key, text in leaves.items()
    }


def _leaves(values: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    items = values.items() if isinstance(values, Mapping) else enumerate(values) if isinstance(values, list) else ()
    for key, value in items:
        if isinstance(value, Mapping | list) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", redacted(value if isinstance(value, str) else json.dumps(value))


def _figures(runs: Sequence[NamedRun], *, fewest: int) -> Iterator[Row[BeforeAfter]]:
    measured = [{row.name: row for row in before_after(run.run)} for run in runs]
    for name in dict.fromkeys(name for rows in measured for name in rows):
        cells = tuple(rows.get(name) for rows in measured)
        first, *others = (row for row in cells if row is not None)
        if 1 + len(others) >= fewest:
            yield Row(first.label if first.same_prompts else f"{first.label}, training", cells)


def _cards(
    runs: Sequence[NamedRun], trainers: Sequence[TrainerKind], *, fewest: int, key: str
) -> dict[Section, tuple[Card, ...]]:
    """One plot for each metric, with a line for each run that has it."""
    from proximo.metrics.report.plots import draw_lines, expanded

    names = list(dict.fromkeys(name for run in runs for name in run.run.names))
    cards: dict[Section, list[Card]] = {section: [] for section in Section}
    drawn: set[str] = set()
    for curve in (curve for trainer in trainers for curve in trainer.metrics.curves):
        traces = [trace for trace in expanded(curve.traces, names) if trace.name in names]
        for trace in traces:
            lines = _lines(runs, trace)
            if trace.name in drawn or len(lines) < fewest:
                continue
            drawn.add(trace.name)
            plot = draw_lines(curve, lines, key=f"{key}-{len(drawn)}")
            title = curve.title if len(traces) == 1 else f"{curve.title}: {trace.label}"
            cards[curve.section].append(Card(title=title, unit=curve.unit, healthy=curve.healthy, plot=plot))
    return {section: tuple(found) for section, found in cards.items()}


def _lines(runs: Sequence[NamedRun], trace: Trace) -> "list[Line]":
    from proximo.metrics.report.plots import Line

    recorded = [(run, run.run.series(trace.name)) for run in runs]
    return [
        Line(label=run.label, colour=run.colour, series=series, style=trace.style)
        for run, series in recorded
        if len(series)
    ]


def _side_by_side(runs: Sequence[NamedRun]) -> tuple[Row[Sample], ...]:
    """The prompts that several runs have answered, in the order of the first that has them."""
    answers: list[dict[str, Sample]] = []
    for run in runs:
        newest: dict[str, Sample] = {}
        for pair in pair_samples(run.run):
            sample = pair.after or pair.before
            if sample is not None:
                newest.setdefault(pair.prompt, sample)
        answers.append(newest)
    prompts = Counter(prompt for each in answers for prompt in each)
    return tuple(
        Row(prompt, tuple(each.get(prompt) for each in answers)) for prompt, count in prompts.items() if count > 1
    )
