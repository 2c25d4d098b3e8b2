"""Rows of tables: CSV and TSV, Parquet, `save_to_disk` folders and Hub data sets.

Every cell of CSV is text, which its user converts. The others are read by pyarrow and datasets, with their types.
"""

import csv
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from proximo.data.rows import Row, nearest
from proximo.errors import DataError
from proximo.hub import nearest_path, within_reach

_NOT_CSV = {
    "end of data": "a quote is opened and never closed; the file is cut off or a quote is stray",
    "new-line": "a carriage return stands alone outside quotes; save the file with line ends of \\n",
}
"""Part of an error of the csv module -> what it means."""


def csv_rows(lines: Iterable[str], source: str, *, delimiter: str = ",") -> Iterator[Row]:
    """Rows of a table whose first line names the columns; quoting as in RFC 4180, blank lines are skipped.

    `lines` keep their line ends, and are read lazily.

    Raises DataError for a column named twice, a row with too few or too many cells, and a quote that is never closed.
    """
    # The csv module's own is 131,072 characters, which long documents exceed; it is put back afterwards.
    limit = csv.field_size_limit(sys.maxsize)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    columns: list[str] = []
    number = 0
    try:
        for cells in filter(None, reader):
            if not columns:
                columns = _columns(cells, source)
                continue
            number += 1
            row = Row(
                source=source, number=number, line=reader.line_num, values=dict(zip(columns, cells, strict=False))
            )
            if len(cells) != len(columns):
                raise DataError(
                    f"{row.origin}: {len(cells)} cells, but the header has {len(columns)} columns "
                    f"({', '.join(columns)}); is a cell missing, or does one with a comma need quotes?"
                )
            yield row
    except csv.Error as error:
        reason = next((told for part, told in _NOT_CSV.items() if part in str(error)), error)
        raise DataError(f"{source}, line {reader.line_num}: not valid CSV: {reason}") from error
    finally:
        csv.field_size_limit(limit)


def _columns(header: list[str], source: str) -> list[str]:
    columns = [name.strip() or f"column {index}" for index, name in enumerate(header, start=1)]
    for name in columns:
        if columns.count(name) > 1:
            raise DataError(f"{source}: the header names the column '{name}' twice")
    return columns


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
        if split not in loaded:
            found = ", ".join(f"'{name}'" for name in loaded)
            raise DataError(f"{source}: no split '{split}'; the folder has {found}{nearest(split, loaded)}")
        loaded = loaded[split]
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


def _numbered(dataset: Any, source: str) -> Iterator[Row]:
    number = 0
    for batch in dataset.with_format("arrow").iter(batch_size=1000):
        for values in batch.to_pylist():
            number += 1
            yield Row(source=source, number=number, values=values, from_table=True)
