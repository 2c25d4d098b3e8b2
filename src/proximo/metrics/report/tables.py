"""Tables for a terminal: metrics and samples before and after training, the same as in the report."""

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from proximo.metrics.formatting import format_change, format_number
from proximo.metrics.report.before_after import BeforeAfter, before_after
from proximo.metrics.report.sample_pairs import SamplePair, pair_samples
from proximo.metrics.run_files import Sample, read_run

OTHER_PROMPTS = (
    "from the first and the last training step, which have different data; set data.held_out_rows to compare on "
    "the same data"
)
STYLES = {True: "green", False: "red", None: ""}


def print_before_after(run_folder: Path, *, console: Console, title: str | None = None) -> None:
    """Print the run's first and last measurements. Prints nothing if there are none."""
    rows = before_after(read_run(run_folder))
    if rows:
        console.print(before_after_table(rows, title=title))


def print_samples(run_folder: Path, *, console: Console, limit: int = 3) -> None:
    """Print the first `limit` held-out prompts with their responses before and after training."""
    pairs = pair_samples(read_run(run_folder))[:limit]
    if pairs:
        console.print(samples_table(pairs))


def before_after_table(rows: Sequence[BeforeAfter], *, title: str | None = None) -> Table:
    """Metrics at the first and last step that has them. Improvements are green."""
    others = [row.label for row in rows if row.before is not None and not row.same_prompts]
    caption = f"{', '.join(others)}: {OTHER_PROMPTS}" if others else None
    table = Table(
        title=title,
        caption=caption,
        box=box.SIMPLE_HEAD,
        title_justify="left",
        title_style="bold",
        caption_justify="left",
    )
    for heading in ("", "before", "after", "change"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    table.add_column("unit", style="dim", no_wrap=True)
    for row in rows:
        change = Text(format_change(row.before, row.after), style=STYLES[row.improved])
        table.add_row(
            row.label, format_number(row.before, row.unit), format_number(row.after, row.unit), change, row.unit
        )
    return table


def samples_table(pairs: Sequence[SamplePair]) -> Table:
    """Prompts with their responses before and after. Markup and control characters in them have no effect."""
    table = Table(box=box.SIMPLE_HEAD, show_lines=True, expand=True)
    for heading in ("prompt", "before", "after"):
        table.add_column(heading, ratio=1, overflow="fold")
    for pair in pairs:
        table.add_row(Text(_printable(pair.prompt)), _answer(pair.before), _answer(pair.after))
    return table


def _printable(text: str) -> str:
    """Replace all control characters but line breaks: a response must not send commands to the terminal."""
    return "".join(
        character if character == "\n" or character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text
    )


def _answer(sample: Sample | None) -> Text:
    if sample is None:
        return Text("")
    facts = {"score": sample.score, "gold": sample.gold, "KL": sample.kl}
    words = [f"{name} {format_number(number)}" for name, number in facts.items() if number is not None]
    return Text.assemble(
        _printable(sample.response), "\n", (", ".join([*words, sample.finish or ""]).strip(", "), "dim")
    )
