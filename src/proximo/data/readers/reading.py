"""From sources to rows: reading, column mapping, the phase of a shared data set, mixing."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from proximo.data.large_lists import collected
from proximo.data.order import DataPhase, phase_indices, shuffled
from proximo.data.readers.function_rows import function_rows
from proximo.data.readers.json_rows import json_array_rows, json_line_rows
from proximo.data.readers.problems import as_problem
from proximo.data.readers.source import DataSource, Format, with_columns
from proximo.data.readers.table_rows import csv_rows, disk_rows, hub_rows, parquet_rows
from proximo.data.readers.text_files import (
    begins_with,
    document_rows,
    file_lines,
    refuse_other_than_text,
)
from proximo.data.rows import Row, nearest
from proximo.distributed.world import current
from proximo.errors import DataError
from proximo.hub import is_local
from proximo.message_text import count_of
from proximo.user_code import IMPORT_PATH

_FORMATS: dict[str, Format] = {
    ".json": "json",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".txt": "text",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSet:
    """Rows ready to be used, source after source in file order."""

    rows: Sequence[Row]
    description: str
    """How many rows each source gave, of those that it has: `train.jsonl: 500 of 2,000 rows`."""


def load_rows(sources: Sequence[DataSource], *, seed: int = 0, phase: DataPhase | None = None) -> RowSet:
    """Reads all sources, takes the phase's part of each, and mixes them by their weights.

    Without weights every row of every source is used once an epoch. With weights, which all sources have or none, the
    shares of the sources in an epoch are the weights, no row twice: the source that runs out first gives all, the
    others a draw made with `seed`. `max_rows` cuts a source before anything else. Large lists are kept on disk
    (`large_lists.py`). Raises DataError naming source and row.
    """
    weights = [source.weight for source in sources if source.weight is not None]
    read = [read_source(source, name=name) for source, name in zip(sources, _short_names(sources), strict=True)]
    parts = [_part(rows, source, phase) for rows, source in zip(read, sources, strict=True)]
    if weights:
        wanted = mixture_counts([len(rows) for rows in parts], weights)
        parts = [
            collected(rows[index] for index in drawn_rows(len(rows), count, seed=seed, source=source_index))
            for source_index, (rows, count) in enumerate(zip(parts, wanted, strict=True))
        ]
    rows = parts[0] if len(parts) == 1 else collected(row for rows in parts for row in rows)
    counts = [
        f"{source.path}: {len(part):,} of {count_of(len(whole), 'row')}"
        for source, whole, part in zip(sources, read, parts, strict=True)
    ]
    return RowSet(rows=rows, description="; ".join(counts))


def read_source(source: DataSource, *, name: str = "") -> Sequence[Row]:
    """The rows of one source, columns mapped, at most `max_rows`. Raises DataError, also if there are none."""
    rows = collected(replace(_mapped(row, source), name=name) for row in islice(_raw_rows(source), source.max_rows))
    if not rows:
        raise DataError(f"{source.path}: the source has no rows")
    return rows


def _mapped(row: Row, source: DataSource) -> Row:
    row = with_columns(row, source.columns)
    return row if source.problems is None else as_problem(row, source.problems, source.template)


def _part(rows: Sequence[Row], source: DataSource, phase: DataPhase | None) -> Sequence[Row]:
    if phase is None or source.whole:
        return rows
    part = collected(rows[index] for index in sorted(phase_indices(len(rows), phase)))
    if not part:
        raise DataError(
            f"{source.path}: part {phase.part} of the proportions {phase.proportions} of {count_of(len(rows), 'row')} "
            "is empty"
        )
    return part


def _short_names(sources: Sequence[DataSource]) -> list[str]:
    names: list[str] = []
    for source in sources:
        stem = source.path.partition(":")[2] or Path(source.path).stem
        taken = sum(name == stem or name.startswith(f"{stem}~") for name in names)
        names.append(f"{stem}~{taken + 1}" if taken else stem)
    return names


def _raw_rows(source: DataSource) -> Iterator[Row]:
    path = Path(source.path).expanduser()
    match _format(source, path):
        case "function":
            return _rows_of_function(source)
        case "hub":
            return hub_rows(source.path, source.path, split=source.split, subset=source.subset)
        case "disk":
            return disk_rows(path, source.path, split=source.split)
        case "parquet":
            return parquet_rows(_existing(path, source), source.path)
        case text_format:
            return _text_rows(text_format, _existing(path, source), source)


def _rows_of_function(source: DataSource) -> Iterator[Row]:
    """The rows of a function. It may do anything, so only rank 0 calls it and sends its rows to the others."""
    rows = function_rows(source.path, source.kwargs)
    if current().size == 1:
        return rows
    return iter(current().on_rank_0(lambda: list(islice(rows, source.max_rows)), what=f"rows of {source.path}"))


def _text_rows(text_format: Format, path: Path, source: DataSource) -> Iterator[Row]:
    # Both endings are used for both forms, so `auto` looks into the file; a named format is trusted.
    if text_format == "json" or (source.format == "auto" and text_format == "jsonl"):
        text_format = "json" if begins_with(b"[", path) else "jsonl"
    match text_format:
        case "jsonl":
            return json_line_rows(file_lines(path, source.path, line_word="row"), source.path)
        case "json":
            return json_array_rows("".join(file_lines(path, source.path)), source.path)
        case "csv":
            delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
            return csv_rows(file_lines(path, source.path), source.path, delimiter=delimiter)
        case _:
            return document_rows(file_lines(path, source.path), source.path, separator=source.separator)


def _format(source: DataSource, path: Path) -> Format:
    if source.format != "auto":
        return source.format
    if path.is_dir():
        return _folder_format(source, path)
    if IMPORT_PATH.fullmatch(source.path) and not path.exists():
        return "function"
    known = _FORMATS.get(path.suffix.lower())
    if known:
        return known
    if not path.exists() and is_local(source.path):
        _existing(path, source)
    if path.exists():
        with _existing(path, source).open("rb") as file:
            refuse_other_than_text(file.read(64), source.path)
        raise DataError(
            f"{source.path}: the ending '{path.suffix}' names no format; set `format` to one of json, jsonl, csv, "
            "parquet, text"
        )
    return "hub"


def _folder_format(source: DataSource, path: Path) -> Format:
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        return "disk"
    files = sorted(file.name for file in path.iterdir())[:5]
    raise DataError(
        f"{source.path}: the folder was not written by save_to_disk; give its data files as sources. "
        f"It holds: {', '.join(files) or 'nothing'}"
    )


def _existing(path: Path, source: DataSource) -> Path:
    if path.is_dir():
        raise DataError(f"{source.path}: a folder, but the format {source.format} is that of a file")
    if path.exists() and not path.is_file():
        raise DataError(f"{source.path}: a pipe or a device, but data is read more than once: write it to a file")
    if not path.exists():
        beside = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
        raise DataError(f"{source.path}: no such file (looked in {path.parent.absolute()}){nearest(path.name, beside)}")
    return path


def mixture_counts(available: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Rows of each source in one epoch, so that their shares are the weights and no row is taken twice.

    The source that runs out first gives all its rows; the others give their share.
    """
    scale = min(count / weight for count, weight in zip(available, weights, strict=True))
    return [min(count, max(1, round(weight * scale))) for count, weight in zip(available, weights, strict=True)]


def drawn_rows(available: int, count: int, *, seed: int, source: int) -> list[int]:
    """Which rows a source gives: a seeded draw without repeats, in file order."""
    if count >= available:
        return list(range(available))
    return sorted(shuffled(available, seed=seed, purpose=f"mixture {source}")[:count])
