"""Runs, samples and metrics as they look in the output cells of notebooks."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any
from zlib import crc32

from proximo.errors import redacted
from proximo.metrics.catalogue import catalogue, trainer_by_metrics
from proximo.metrics.curves import Section
from proximo.metrics.formatting import format_change, format_number
from proximo.metrics.notebook.html import Card, Column, Drawing, Table, table_html
from proximo.metrics.report.before_after import before_after
from proximo.metrics.report.head import facts
from proximo.metrics.report.sample_pairs import pair_samples
from proximo.metrics.report.views import UNTITLED, run_alarms
from proximo.metrics.run_files import Run

CURVES_SHOWN, PAIRS_SHOWN, SAMPLES_SHOWN = 3, 4, 20
TONES = {True: "good", False: "bad", None: ""}
COLUMNS = {
    "prompt": Column.TEXT,
    "response": Column.TEXT,
    "chosen": Column.TEXT,
    "rejected": Column.TEXT,
    "score": Column.NUMBER,
    "score_chosen": Column.NUMBER,
    "score_rejected": Column.NUMBER,
    "gold": Column.NUMBER,
    "kl": Column.NUMBER,
    "num_tokens": Column.NUMBER,
    "finish": Column.WORDS,
}
"""The fields of samples that a table shows."""
HEADINGS = {
    "num_tokens": "tokens",
    "kl": "KL",
    "finish": "ended by",
    "score_chosen": "score of chosen",
    "score_rejected": "of rejected",
}


class Samples(list[Mapping[str, Any]]):
    """Rows of samples.jsonl, without the step. A notebook shows them as a table."""

    def _repr_html_(self) -> str:
        return table_html(samples_table(self))


def run_card(run: Run, *, folder: str) -> Card:
    """A run: what it is, its headline figures before and after, alarms, curves, and some samples."""
    trainer = trainer_by_metrics(run.names)
    return Card(
        title=f"{trainer.title if trainer else UNTITLED}: {run.name}",
        facts=[("Folder", folder), *((label, redacted(text)) for label, text in facts(run))],
        warnings=[f"{alarm.title}. {alarm.detail} {alarm.advice}" for alarm in run_alarms(run)],
        tables=list(_figures(run)),
        drawings=list(islice(_drawings(run, key=f"{crc32(f'{folder} {run.last_step}'.encode()):x}"), CURVES_SHOWN)),
        folded=list(_pairs(run)),
    )


def metrics_table(metrics: Mapping[str, float], *, title: str = "") -> Table:
    """Every metric with its unit."""
    units = {name: catalogue().find(name).unit for name in metrics}
    return Table(
        title=title,
        columns={"metric": Column.WORDS, "value": Column.NUMBER, "unit": Column.WORDS},
        rows=[(name, format_number(number, units[name]), units[name]) for name, number in metrics.items()],
    )


def samples_table(samples: Sequence[Mapping[str, Any]], *, title: str = "") -> Table:
    """The first samples, with those of the known fields that one of them has."""
    shown = samples[:SAMPLES_SHOWN]
    fields = [name for name in COLUMNS if any(sample.get(name) is not None for sample in shown)]
    return Table(
        title=title,
        columns={HEADINGS.get(name, name): COLUMNS[name] for name in fields},
        rows=[[_text(sample.get(name)) for name in fields] for sample in shown],
        num_more=len(samples) - len(shown),
    )


def _text(value: object) -> str:
    if value is None:
        return ""
    return format_number(value) if isinstance(value, int | float) else str(value)


def _figures(run: Run) -> Iterator[Table]:
    rows = before_after(run)
    if rows:
        yield Table(
            columns={
                "": Column.WORDS,
                "before": Column.NUMBER,
                "after": Column.NUMBER,
                "unit": Column.WORDS,
                "change": Column.NUMBER,
            },
            rows=[
                (
                    row.label,
                    format_number(row.before, row.unit),
                    format_number(row.after, row.unit),
                    row.unit,
                    format_change(row.before, row.after),
                )
                for row in rows
            ],
            tones=[TONES[row.improved] for row in rows],
        )


def _drawings(run: Run, *, key: str) -> Iterator[Drawing]:
    """The main curves in order. `key` must be unique in the notebook."""
    trainer = trainer_by_metrics(run.names)
    curves = [curve for curve in trainer.metrics.curves if curve.section is Section.MAIN] if trainer else []
    if len(run.lines) < 2 or not curves:
        return
    from proximo.metrics.report.plots import draw_curve  # imports matplotlib

    for curve in curves:
        plot = draw_curve(curve, run, key=f"cell-{key}-{curve.key}")
        if plot is not None:
            yield Drawing(title=curve.title, unit=curve.unit, svg=plot.svg, legend=plot.legend)


def _pairs(run: Run) -> Iterator[Table]:
    pairs = pair_samples(run)
    shown = pairs[:PAIRS_SHOWN]
    if shown:
        yield Table(
            title="Samples: the first in order, not chosen",
            columns={"prompt": Column.TEXT, "before": Column.TEXT, "after": Column.TEXT},
            rows=[
                (
                    pair.prompt,
                    pair.before.response if pair.before else "",
                    pair.after.response if pair.after else "",
                )
                for pair in shown
            ],
            num_more=len(pairs) - len(shown),
        )
    if run.samples.pairs:
        yield samples_table(
            [
                {
                    name: getattr(pair, name)
                    for name in ("prompt", "chosen", "rejected", "score_chosen", "score_rejected")
                }
                for pair in run.samples.pairs
            ],
            title="Held-out pairs",
        )
