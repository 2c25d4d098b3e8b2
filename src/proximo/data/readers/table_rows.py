"""Rows of tables: CSV and TSV, Parquet, `save_to_disk` folders and Hub data sets.

Every cell of CSV is text, which its user converts. The others are read by pyarrow and datasets, with their types.
"""

import csv
import io
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from proximo.data.rows import Row, nearest
from proximo.errors import DataError
from proximo.hub import nearest_path, within_reach


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


def parquet_rows(path: Path, source: str) -> Iterator[Row]:
    """Rows of one Parquet file, in file order."""
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1000):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(source=source, number=number, values=values, from_table=True)
    except (pyarrow.ArrowException, OSError) as error:
        place = f"after row {number}" if number else "at its start"
        raise DataError(f"{source}: not a whole Parquet file ({place}): {error}") from error


def disk_rows(path: Path, source: str, *, split: str) -> Iterator[Row]:
    """Rows of a folder written by `datasets.Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        loaded: Any = datasets.load_from_disk(str(path))
    except (DatasetsError, OSError, ValueError) as error:
        raise DataError(f"{source}: the save_to_disk folder cannot be read: {error}") from error
    if isinstance(loaded, datasets.DatasetDict):
        loaded = _split_of(loaded, split, source)
    return _numbered(loaded, source)


def hub_rows(name: str, source: str, *, split: str, subset: str | None) -> Iterator[Row]:
    """Rows of a Hub data set, from the network or from the cache of datasets."""
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        with within_reach(name):
            loaded = datasets.load_dataset(name, subset, split=split)
    except (DatasetsError, OSError, ValueError) as error:
        near = nearest_path(name)
        hint = "" if near is None else f"; did you mean {near}?"
        raise DataError(
            f"{source}: not a file or folder here, and the Hub gave no data set of that name "
            f"(split '{split}', subset {subset!r}): {error}{hint}"
        ) from error
    return _numbered(loaded, source)


def _split_of(splits: Any, wanted: str, source: str) -> Any:
    if wanted in splits:
        return splits[wanted]
    found = ", ".join(f"'{name}'" for name in splits)
    raise DataError(f"{source}: no split '{wanted}'; the folder has {found}{nearest(wanted, splits)}")


def _numbered(dataset: Any, source: str) -> Iterator[Row]:
    number = 0
    for batch in dataset.with_format("arrow").iter(batch_size=1000):
        for values in batch.to_pylist():
            number += 1
            yield Row(source=source, number=number, values=values, from_table=True)
