"""Tables for a terminal or a notebook: metrics and samples, before and after training and of one evaluation."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.jupyter import JupyterMixin
from rich.table import Table
from rich.text import Text

from proximo.message_text import format_number
from proximo.metrics.catalogue import catalogue
from proximo.metrics.report.run_summary import BeforeAfter, before_after, pair_samples
from proximo.metrics.run_files import Sample, read_run

Row = TypeVar("Row")
OTHER_PROMPTS = (
    "from the first and the last training step, which have different data; set data.held_out_rows to compare on "
    "the same data"
)
COLUMNS = {
    "prompt": "prompt",
    "response": "response",
    "score": "score",
    "gold": "gold",
    "kl": "KL",
    "num_tokens": "tokens",
    "finish": "ended by",
}
"""Fields of samples that a table shows -> their headings."""
TEXTS = ("prompt", "response")
SAMPLES_SHOWN = 20
PRINTED_SAMPLES = 3
STYLES = {"better": "green", "worse": "red", "": ""}


def print_before_after(run_folder: Path, *, console: Console) -> None:
    """Print the run's first and last measurements. Prints nothing if there are none."""
    rows = before_after(read_run(run_folder))
    if rows:
        console.print(before_after_table(rows))


def print_samples(run_folder: Path, *, console: Console) -> None:
    """Print the first PRINTED_SAMPLES held-out prompts with their responses before and after training."""
    table = Table("prompt", "before", "after", box=box.SIMPLE_HEAD, show_lines=True, expand=True)
    for pair in pair_samples(read_run(run_folder))[:PRINTED_SAMPLES]:
        texts = (pair.prompt, _answer(pair.before), _answer(pair.after))
        table.add_row(*(Text(_printable(text), overflow="fold") for text in texts))
    if table.rows:
        console.print(table)


def _answer(sample: Sample | None) -> str:
    if sample is None:
        return ""
    facts = {"score": sample.score, "gold": sample.gold, "KL": sample.kl}
    numbers = ", ".join(f"{name} {format_number(value)}" for name, value in facts.items() if value is not None)
    return f"{sample.response}\n{numbers}"


def before_after_table(rows: Sequence[BeforeAfter]) -> Table:
    """Metrics at the first and last step that has them. Improvements are green."""
    others = [row.label for row in rows if row.before is not None and not row.same_prompts]
    caption = f"{', '.join(others)}: {OTHER_PROMPTS}" if others else None
    table = Table(caption=caption, box=box.SIMPLE_HEAD, caption_justify="left")
    for heading in ("", "before", "after", "change"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    table.add_column("unit", style="dim", no_wrap=True)
    for row in rows:
        change = Text(row.change, style=STYLES[row.verdict])
        table.add_row(row.label, row.shown_before or "-", row.shown_after, change, row.unit)
    return table


class ShownRows(list[Row], JupyterMixin):
    """A list that a notebook, and `rich.print`, show as a table of its first items."""

    def __rich__(self) -> Table:
        return rows_table([self._fields(row) for row in self[:SAMPLES_SHOWN]], num_rows=len(self))

    def _fields(self, row: Row) -> Mapping[str, Any]:
        """The item's values by the keys of COLUMNS; others are not shown."""
        raise NotImplementedError


class Samples(ShownRows[Mapping[str, Any]]):
    """Rows of samples.jsonl, without the step."""

    def _fields(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        return row


def rows_table(rows: Sequence[Mapping[str, Any]], *, num_rows: int) -> Table:
    """Rows with those of the known fields that one of them has. `num_rows`: how many there are in all."""
    more = num_rows - len(rows)
    table = Table(box=box.SIMPLE_HEAD, show_lines=True, caption=f"{more:,} more" if more else None)
    fields = [name for name in COLUMNS if any(row.get(name) is not None for row in rows)]
    for name in fields:
        is_text = name in TEXTS
        table.add_column(COLUMNS[name], ratio=1 if is_text else None, overflow="fold", no_wrap=not is_text)
    for row in rows:
        table.add_row(*(Text(_value(row.get(name))) for name in fields))
    return table


def metrics_table(metrics: Mapping[str, float], *, title: str) -> Table:
    """Every metric with its value in its unit."""
    table = Table("metric", "value", title=title)
    for name, number in metrics.items():
        table.add_row(name, format_number(number, catalogue().find(name).unit))
    return table


def _value(value: object) -> str:
    if value is None:
        return ""
    return format_number(value) if isinstance(value, int | float) else _printable(str(value))


def _printable(text: str) -> str:
    """Replace all control characters but line breaks: a response must not send commands to the terminal."""
    return "".join(
        character if character == "\n" or character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text
    )
