"""Rows of Parquet files, `save_to_disk` folders and Hub data sets, read by pyarrow and datasets."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from proximo.data.rows import Row, nearest
from proximo.errors import DataError
from proximo.hub import nearest_path, within_reach


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
