"""Rows of JSON files: an array of objects, or one object per line. Other text is an error that names the row.

Every row is decoded by itself, and its values are those of the file. Readers with one type for each column, such as
that of Arrow, turn texts that look like dates into times, whole numbers into floats, and missing keys into nulls.
"""

import json
import re
from collections.abc import Iterable, Iterator
from math import isinf
from typing import Any, NoReturn

from proximo.data.rows import Row
from proximo.errors import DataError

_BLANK = " \t\r\n"
_BETWEEN = re.compile(r"[ \t\r\n]*([,\]])[ \t\r\n]*")


def json_line_rows(lines: Iterable[str], source: str) -> Iterator[Row]:
    """One object per line. Blank lines are skipped but counted, so that the row number is the line number."""
    decoder = _strict_decoder()
    for number, line in enumerate(lines, start=1):
        content = line.strip(_BLANK)
        if content:
            value, end = _decode_at(decoder, content, 0, source=source, number=number)
            if end != len(content):
                raise DataError(
                    f"{source}, row {number}: more text after the object: {content[end : end + 40]!r}; "
                    "JSON lines hold one object per line"
                )
            yield _row(value, source, number)


def json_array_rows(text: str, source: str) -> Iterator[Row]:
    """An array of objects, decoded one element at a time so that an error knows its row."""
    decoder = _strict_decoder()
    start = text.index("[") + 1
    number, position = 0, len(text) - len(text[start:].lstrip(_BLANK))
    ended = text.startswith("]", position)
    while not ended:
        number += 1
        value, position = _decode_at(decoder, text, position, source=source, number=number)
        yield _row(value, source, number)
        found = _BETWEEN.match(text, position)
        if found is None:
            raise DataError(
                f"{source}: after row {number} a comma or the end of the array is wanted, got "
                f"{text[position : position + 20]!r}; was the file copied or downloaded whole?"
            )
        position, ended = found.end(), found[1] == "]"
    rest = text[position:].strip(_BLANK).removeprefix("" if number else "]")
    if rest:
        raise DataError(f"{source}: more text after the end of the array: {rest[:40]!r}")


def _strict_decoder() -> json.JSONDecoder:
    return json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_refuse_constant, parse_float=_finite)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key '{twice}' appears twice in one object")
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value; a missing number is null")


def _finite(text: str) -> float:
    number = float(text)
    if isinf(number):
        raise ValueError(f"the number {text} is too large for 64 bits; write it as text")
    return number


def _decode_at(decoder: json.JSONDecoder, text: str, position: int, *, source: str, number: int) -> tuple[Any, int]:
    try:
        return decoder.raw_decode(text, position)
    except json.JSONDecodeError as error:
        raise DataError(f"{source}, row {number}: {_explain(error, text)}") from error
    except RecursionError as error:
        raise DataError(f"{source}, row {number}: the value is nested too deeply to be a row") from error
    except ValueError as error:
        raise DataError(f"{source}, row {number}: {error}") from error


def _explain(error: json.JSONDecodeError, text: str) -> str:
    if error.msg.startswith("Unterminated string") or error.pos >= len(text.rstrip(_BLANK)):
        return "the row is cut off before its end; was the file copied or downloaded whole?"
    reason = error.msg.removesuffix(" at")
    return f"not valid JSON ({reason} at {text[error.pos : error.pos + 20]!r}, column {error.colno})"


def _row(value: Any, source: str, number: int) -> Row:
    if not isinstance(value, dict):
        hint = "; the file is one JSON array: set `format: json`" if isinstance(value, list) and number == 1 else ""
        raise DataError(
            f"{source}, row {number}: a row must be an object with a key per column, got {type(value).__name__}{hint}"
        )
    return Row(source=source, number=number, values=value)
