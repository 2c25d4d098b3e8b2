"""The description of a source of rows, as the user gives it, and the mapping of its columns to fields."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from proximo.data.rows import Row, columns_found, nearest
from proximo.errors import DataError

Format = Literal["auto", "json", "jsonl", "csv", "parquet", "disk", "hub", "text", "function"]

Problems = Literal["gsm8k", "math", "humaneval", "mbpp", "countdown", "areal_math", "areal_code"]
"""Names of the known data sets of problems."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSource:
    """A file, a `save_to_disk` folder, a Hub data set, or a function that yields rows."""

    path: str
    """File, folder, name on the Hub, or `package.module:function`."""
    format: Format = "auto"
    split: str = "train"
    """Split of a Hub data set, or of a folder that holds several."""
    subset: str | None = None
    """Configuration name of a Hub data set."""
    separator: str | None = None
    """For text: the line between documents; None separates at blank lines, "" makes the file one document."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Field -> column that holds it, or a text with `{column}` in it; "" leaves the field out."""
    problems: Problems | None = None
    """The data set of problems whose rows these are (`problems.py`), after `columns`."""
    template: str | None = None
    """The prompt of such a problem, with names in braces; None takes the data set's own."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of a function."""
    weight: float | None = None
    """Share in a mixture, relative to the weights of the other sources."""
    max_rows: int | None = None
    """Take only this many rows, from the start."""
    whole: bool = False
    """True if a phase takes the whole source instead of its part."""


_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([^{}]+)\}")


def with_columns(row: Row, columns: Mapping[str, str]) -> Row:
    """The row with each field of `columns` filled: from a column, or from a text with `{column}` in it.

    A column taken whole is renamed; columns named inside a text stay and count as used, unless they are filled too.
    `{{` and `}}` are literal braces. An empty column name removes the field. Raises DataError naming the row for a
    missing column.
    """
    if not columns:
        return row
    filled = {field: filled_in(row, field, column) for field, column in columns.items() if column}
    taken = {*columns, *columns.values()}
    rest = {name: value for name, value in row.values.items() if name not in taken}
    named = (name for column in columns.values() for name in named_in(row, column) if name not in filled)
    return replace(row, values=rest | filled, used=tuple(dict.fromkeys(named)))


def named_in(row: Row, template: str) -> list[str]:
    """The columns of the row that a text names in braces."""
    names = [match[1] for match in _PLACEHOLDER.finditer(template) if template not in row.values]
    return [name for name in names if name in row.values]


def filled_in(row: Row, field: str, column: str) -> Any:
    """The cell of a column, or a text with `{column}` replaced by cells.

    Raises DataError naming the row for a missing column.
    """
    if column in row.values:
        return row.values[column]
    if not _PLACEHOLDER.search(column):
        raise DataError(_missing(row, field, column))
    return _PLACEHOLDER.sub(lambda match: _substitute(row, field, match), column)


def _substitute(row: Row, field: str, match: re.Match[str]) -> str:
    name = match[1]
    if name is None:
        return match[0][0]
    if name not in row.values:
        raise DataError(_missing(row, field, name) + ". A literal brace is written twice, {{ and }}")
    value = row.values[name]
    if value is None:
        raise DataError(f"{row.origin}: column '{name}' is null, but field '{field}' needs it")
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _missing(row: Row, field: str, column: str) -> str:
    return (
        f"{row.origin}: no column '{column}' (wanted for field '{field}'); "
        f"columns found: {columns_found(row)}{nearest(column, row.values)}"
    )
