"""The contents of a report as plain values for the template, with drawn curves."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from io import StringIO
from typing import TYPE_CHECKING

from ruamel.yaml import YAML

from proximo import message_text
from proximo.errors import redacted
from proximo.metrics.alarms import Alarm, find_alarms
from proximo.metrics.catalogue import catalogue, trainer_by_metrics
from proximo.metrics.definitions import Metric, Section
from proximo.metrics.report.run_summary import BeforeAfter, SamplePair, before_after, facts, pair_samples
from proximo.metrics.run_files import Run, ScoredPair
from proximo.metrics.shared_declarations import NO_UPDATE
from proximo.trainer_kinds import TrainerKind

if TYPE_CHECKING:  # a run draws nothing before its end, and importing matplotlib would delay its first step
    from proximo.metrics.report.plots import Plot

UNTITLED = "Run"
"""The title of a stage whose trainer is unknown."""
PAIRS_SHOWN = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """One plot with its explanation."""

    title: str
    unit: str
    healthy: str
    plot: "Plot"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """The contents of the report about one run. `key`: unique among the stages of a page."""

    key: str
    run: Run
    trainer: TrainerKind | None
    facts: tuple[tuple[str, str], ...]
    """(label, text) of model, task, device, duration and outcome."""
    figures: tuple[BeforeAfter, ...]
    alarms: tuple[Alarm, ...]
    cards: dict[Section, tuple[Card, ...]]
    samples: tuple[SamplePair, ...]
    pairs: tuple[ScoredPair, ...]
    """The pairs with the lowest and the highest margins, which show best what a reward model looks at."""
    metrics: tuple[tuple[str, Metric, str], ...]
    """The declared metrics that the run has recorded, with their definitions."""

    @property
    def short_title(self) -> str:
        return self.trainer.short_title if self.trainer else UNTITLED

    @property
    def headlines(self) -> tuple[BeforeAfter, ...]:
        """The figures at the top of a pipeline's report."""
        return self.figures[: self.trainer.metrics.num_headlines if self.trainer else 1]


def stage_view(run: Run, *, key: str) -> Stage:
    """The view of a run."""
    pairs = sorted(run.samples.pairs, key=lambda pair: pair.margin)
    half = PAIRS_SHOWN // 2
    declared = ((name, catalogue().get(name)) for name in run.names)
    return Stage(
        key=key,
        run=run,
        trainer=trainer_by_metrics(run.names),
        facts=facts(run),
        figures=before_after(run),
        alarms=run_alarms(run),
        cards={section: tuple(_cards(run, section, key)) for section in Section},
        samples=pair_samples(run),
        pairs=tuple(pairs if len(pairs) <= PAIRS_SHOWN else (*pairs[:half], *pairs[-half:])),
        metrics=tuple((name, metric, definition_of(metric)) for name, metric in declared if metric is not None),
    )


def definition_of(metric: Metric) -> str:
    """In sentences, by docs/metrics.md; empty if there is none."""
    return metric.definition or _defined().get(metric.name, "")


@cache
def _defined() -> Mapping[str, str]:
    page = message_text.folder() / "metrics.md"
    lines = page.read_text(encoding="utf-8").splitlines() if page.is_file() else []  # sources may come without pages
    rows = (re.split(r" (?<!\\)\| ?", line) for line in lines if line.startswith("| `"))
    return {cells[0].split("`")[1]: cells[4].replace(r"\|", "|") for cells in rows if len(cells) == 6}


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


def _cards(run: Run, section: Section, stage: str) -> Iterator[Card]:
    from proximo.metrics.report.plots import draw_curve

    trainer = trainer_by_metrics(run.names)
    curves = trainer.metrics.curves if trainer else ()
    for curve in curves:
        plot = draw_curve(curve, run, key=f"{stage}-{curve.key}") if curve.section is section else None
        if plot is not None:
            yield Card(title=curve.title, unit=curve.unit, healthy=curve.healthy, plot=plot)


def as_yaml(values: object) -> str:
    """Values as YAML, with possible secrets in addresses removed, since reports are shared."""
    yaml, written = YAML(typ="safe", pure=True), StringIO()
    yaml.default_flow_style, yaml.sort_base_mapping_type_on_output, yaml.width = False, False, 100
    yaml.dump(values, written)
    return redacted(written.getvalue())
