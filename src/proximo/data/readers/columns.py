"""Maps the columns of a source to the fields that Proximo reads."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from proximo.data.rows import Row, columns_found, nearest
from proximo.errors import DataError

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
