"""Typed access to the cells of a row: text, numbers, flags, votes. Errors name the row."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from proximo.data.rows import Row, columns_found, nearest
from proximo.errors import DataError


def text_cell(row: Row, field: str) -> str:
    """A cell of text. Raises DataError for a number, because a wrong column is the likely reason."""
    value = cell(row, field)
    if not isinstance(value, str):
        hint = "" if isinstance(value, list | Mapping) else f"; `{field}: '{{column}}'` under columns takes it as text"
        raise DataError(f"{row.origin}: column '{field}' must be text, got {describe(value)}{hint}")
    return encodable(value, row, field)


def answer_cell(row: Row, field: str) -> str | None:
    """A reference answer (text or a number) as text; None if the row has none."""
    value = row.values.get(field)
    if value is None:
        return None
    if isinstance(value, str):
        return encodable(value, row, field)
    if not isinstance(value, int | float) or (isinstance(value, float) and not math.isfinite(value)):
        raise DataError(
            f"{row.origin}: column '{field}' must be text or a number, got {describe(value)}; "
            "under another name it is kept as metadata"
        )
    return str(value)


def number_cell(row: Row, field: str) -> float | None:
    """A finite number, or text of one; None if the row has none."""
    value = row.values.get(field)
    if value is None or value == "":
        return None
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"{row.origin}: column '{field}' must be a finite number, got {describe(value)}")
    return number


_FLAGS = {"true": True, "1": True, "false": False, "0": False}


def flag_cell(row: Row, field: str) -> bool:
    """true or false: a boolean, text (as in CSV), or 1 and 0."""
    value = cell(row, field)
    flag = _FLAGS.get(str(value).strip().casefold()) if isinstance(value, str | bool | int) else None
    if flag is None:
        raise DataError(f"{row.origin}: column '{field}' must be true or false, got {describe(value)}")
    return flag


def mean_cell(row: Row, field: str) -> float | None:
    """The mean of a list of finite numbers, or one number; None if the row has none."""
    value = row.values.get(field)
    if not isinstance(value, list | tuple):
        return number_cell(row, field)
    numbers = [number_cell(replace(row, values={field: item}), field) for item in value]
    if None in numbers:
        raise DataError(f"{row.origin}: column '{field}' must hold finite numbers, got {value!r:.60}")
    return sum(number for number in numbers if number is not None) / len(numbers) if numbers else None


def votes_cell(row: Row, field: str) -> tuple[int, ...]:
    """Votes for the first (1) or the second (2) of two outputs, or a tie (0): one, a list, or text such as "1 2 2"."""
    value = cell(row, field)
    parts = re.split(r"[\s,;]+", value.strip()) if isinstance(value, str) else value
    votes = parts if isinstance(parts, list | tuple) else [parts]
    if not votes or not all(str(vote) in ("0", "1", "2") for vote in votes):
        raise DataError(
            f"{row.origin}: column '{field}' must say which output is better (1 or 2, 0 for a tie), "
            f"got {describe(value)}"
        )
    return tuple(int(vote) for vote in votes)


def cell(row: Row, field: str) -> Any:
    """A cell. Raises DataError if it is missing or null."""
    if field not in row.values:
        raise DataError(
            f"{row.origin}: no column '{field}'; columns found: {columns_found(row)}{nearest(field, row.values)}. "
            f"Name the column that holds it in the source: `columns: {{{field}: <column>}}`"
        )
    value = row.values[field]
    if value is None:
        raise DataError(f"{row.origin}: column '{field}' is null")
    return value


def describe(value: Any) -> str:
    """A short description of a value, for a message."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return f"the text {value[:40]!r}" + ("..." if len(value) > 40 else "")
    if isinstance(value, Mapping):
        return f"an object with keys {sorted(map(str, value))}"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    return f"{value!r:.40} ({type(value).__name__})"


def encodable(text: str, row: Row, location: str) -> str:
    """The text. Raises DataError naming the place if it cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{row.origin}: {location} holds half of a surrogate pair (\\u{ord(text[error.start]):04x}), "
            "which no tokenizer can read; the text was cut or escaped wrongly"
        ) from error
    return text
