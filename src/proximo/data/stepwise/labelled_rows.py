"""Rows to solutions in steps with labels, before there are tokens. Imports no torch."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from proximo.data.formats.column_use import read_by_source
from proximo.data.formats.context_columns import in_context
from proximo.data.formats.preference_formats import prompt_in
from proximo.data.formats.prompt_response import Exchange
from proximo.data.formats.typed_columns import cell, describe, text_cell
from proximo.data.load_report import Remark
from proximo.data.rows import Row
from proximo.errors import DataError

LabelledSolution = tuple[Row, Exchange, tuple[str, ...], tuple[float, ...]]
"""A row, its prompt, its steps, and for each step whether it is right: 1, 0, or a probability."""


def labelled_solutions(rows: Iterable[Row], remarks: Counter[Remark]) -> Iterator[LabelledSolution]:
    """The solution of each row. `remarks`: see `read_by_source`. Raises DataError naming a malformed row."""
    return read_by_source(rows, lambda _: _solution, remarks)


def _solution(row: Row) -> LabelledSolution:
    return row, in_context(row, Exchange(origin=row.origin, prompt=prompt_in(row))), *_labelled(row)


def _labelled(row: Row) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """The steps and labels of a row; the columns are `steps` or TRL's `completions`, and `labels`."""
    field = "completions" if "steps" not in row.values and "completions" in row.values else "steps"
    steps = tuple(_step(row, field, step) for step in _list(row, field))
    labels = tuple(_label(row, label) for label in _list(row, "labels"))
    if len(steps) != len(labels):
        raise DataError(
            f"{row.origin}: column 'labels' must have one label for each of the {len(steps)} steps, got {len(labels)}"
        )
    return steps, labels


def _list(row: Row, field: str) -> Sequence[Any]:
    value = cell(row, field)
    if not isinstance(value, list | tuple) or not value:
        raise DataError(
            f"{row.origin}: column '{field}' must be a list with an entry for each step, got {describe(value)}"
        )
    return value


def _step(row: Row, field: str, step: Any) -> str:
    text = text_cell(replace(row, values={field: step}), field).strip()
    if not text:
        raise DataError(f"{row.origin}: column '{field}' has a blank step: leave it out, with its label")
    return text


def _label(row: Row, label: Any) -> float:
    is_number = isinstance(label, bool | int | float)
    if not is_number or not 0 <= label <= 1:  # NaN is neither
        raise DataError(
            f"{row.origin}: a label must be true, false, or the probability that the step is right, from 0 to 1; got "
            f"{describe(label)}"
        )
    return float(label)
