"""A row of a data set with its origin. `readers/` reads rows, `formats/` interprets them."""

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from proximo.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The cells of one row by column, and its origin."""

    source: str
    """The source as the user named it; error messages begin with it."""
    number: int
    """Counted from 1: the line of a JSON-lines file, the element of an array, the data row of a table."""
    values: Mapping[str, Any]
    line: int | None = None
    """The line of the file at which the row ends, if it differs from `number`."""
    name: str = ""
    """A short name of the source, unique within a load; ids begin with it."""
    used: tuple[str, ...] = ()
    """Columns that were used to fill other cells."""
    from_table: bool = False
    """True if every object in a column has the keys of all, with null for those that it lacks."""
    from_text: Collection[str] = ()
    """Columns whose objects were read from JSON text, to which a table adds no nulls."""

    @property
    def origin(self) -> str:
        """`reviews.csv, row 17 (line 23)`."""
        line = "" if self.line is None else f" (line {self.line})"
        return f"{self.source}, row {self.number}{line}"


def nearest(wanted: str, names: Iterable[str]) -> str:
    """`; did you mean NAME?` with the most similar name, or ""."""
    names = [str(name) for name in names]
    folded = {name.casefold(): name for name in names}
    close = get_close_matches(wanted.casefold(), folded, n=1, cutoff=0.6)
    return f"; nearest: '{folded[close[0]]}'" if close else ""


def columns_found(row: Row) -> str:
    """The columns of a row, for a message."""
    return ", ".join(f"'{name}'" for name in row.values) or "none"


def row_ids(rows: Sequence[Row]) -> list[str]:
    """The id of each row: its `id` cell, or `<source>-<row>`.

    Raises DataError if an id is neither text nor a whole number, or appears twice; the message names both rows.
    """
    check_row_ids(rows)
    return [row_id(row) for row in rows]


def check_row_ids(rows: Sequence[Row]) -> None:
    """Raises what `row_ids` raises, with one number of memory for each row."""
    hashes = array("q", (hash(row_id(row)) for row in rows))
    if num_distinct(hashes) == len(hashes):
        return
    twice = {each for each, count in Counter(hashes).items() if count > 1}
    seen: dict[str, Row] = {}
    for row in rows:
        identity = row_id(row)
        if identity in seen:
            raise DataError(
                f"{row.origin}: id '{identity}' is already that of {seen[identity].origin}; ids must differ. "
                "Map another column to id, or write `id: ''` under columns to number the rows"
            )
        if hash(identity) in twice:
            seen[identity] = row


def row_id(row: Row) -> str:
    """The id of one row, as `row_ids` gives it. Raises DataError for an id of another type."""
    value = row.values.get("id")
    if value is None:
        return f"{row.name or row.source}-{row.number}"
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise DataError(f"{row.origin}: column 'id' must be text or a whole number, got {value!r:.80}")
    return str(value)


def num_distinct(hashes: array) -> int:
    """The number of distinct hashes. It takes 8 bytes for each, where a set takes 60 and more."""
    import numpy as np

    return len(np.unique(np.frombuffer(hashes, dtype=np.int64))) if hashes else 0


def fingerprints(rows: Iterable[Row]) -> dict[str, str]:
    """Name of each source -> its number of rows, and a hash of their contents in order."""
    digests: dict[str, Any] = {}
    counts: Counter[str] = Counter()
    for row in rows:
        digest = digests.setdefault(row.source, hashlib.sha256())
        digest.update(json.dumps(row.values, sort_keys=True, default=repr).encode())
        digest.update(b"\n")
        counts[row.source] += 1
    return {name: f"{counts[name]} rows, sha256 {digest.hexdigest()[:16]}" for name, digest in digests.items()}
