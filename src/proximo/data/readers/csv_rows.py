"""Rows of CSV and TSV files with a header line. Every cell is text; its user converts it."""

import csv
import io
import sys
from collections.abc import Iterable, Iterator

from proximo.data.rows import Row
from proximo.errors import DataError


def csv_rows(lines: Iterable[str], source: str, *, delimiter: str = ",") -> Iterator[Row]:
    """Rows of a table whose first line names the columns; quoting as in RFC 4180, blank lines are skipped.

    `lines` keep their line ends, and are read lazily.

    Raises DataError for a column named twice, a row with too few or too many cells, and a quote that is never closed.
    """
    parsed = _parsed(lines, source, delimiter)
    columns = _columns(next(cells for _, cells in parsed if cells), source)
    number = 0
    for line, cells in parsed:
        if cells:
            number += 1
            row = Row(source=source, number=number, line=line, values={})
            if len(cells) != len(columns):
                _refuse_width(row, cells, columns)
            yield Row(source=source, number=number, line=line, values=dict(zip(columns, cells, strict=True)))


def _parsed(lines: Iterable[str], source: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(_with_old_line_ends(lines), delimiter=delimiter, strict=True)
    while True:
        # The csv module's limit is 131,072 characters, which long documents exceed; it is restored afterwards.
        limit = csv.field_size_limit(sys.maxsize)
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            cut_off = "end of data" in str(error)
            reason = "a quote is opened and never closed; the file is cut off or a quote is stray" if cut_off else error
            raise DataError(f"{source}, line {reader.line_num}: not valid CSV: {reason}") from error
        finally:
            csv.field_size_limit(limit)
        yield reader.line_num, cells


def _with_old_line_ends(lines: Iterable[str]) -> Iterator[str]:
    """The lines, split also at lone carriage returns, which old programs write."""
    for line in lines:
        if "\r" in line.removesuffix("\r\n"):
            yield from io.StringIO(line, newline="")
        else:
            yield line


def _columns(header: list[str], source: str) -> list[str]:
    columns = [name.strip() or f"column {index}" for index, name in enumerate(header, start=1)]
    for name in columns:
        if columns.count(name) > 1:
            raise DataError(f"{source}: the header names the column '{name}' twice")
    return columns


def _refuse_width(row: Row, cells: list[str], columns: list[str]) -> None:
    relation = "fewer" if len(cells) < len(columns) else "more"
    hint = "the row is cut off or a cell is missing" if relation == "fewer" else "a cell with a comma needs quotes"
    raise DataError(
        f"{row.origin}: {len(cells)} cells, {relation} than the {len(columns)} columns of the header "
        f"({', '.join(columns)}); {hint}"
    )
