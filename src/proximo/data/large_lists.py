"""Lists of records that may be larger than memory: above 16 MiB they are kept in a temporary file.

A record is a frozen dataclass of plain values: rows, examples, pairs, prompts. Both forms are read by position, so the
order of data and an exact resume do not depend on the form. The file has no name and ends with the process.
"""

import errno
import marshal
import os
import tempfile
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, overload

from proximo.errors import DataError

Record = TypeVar("Record")
Item = TypeVar("Item")

LARGEST_IN_MEMORY = 16 * 2**20
"""Encoded bytes up to which a list stays in memory. Records in memory take about five times as much."""
PORTION_ITEMS = 10_000
PORTION_SIZE = 4_000_000
_WRITTEN_AT_ONCE = 2**20
_PLAIN = frozenset({str, int, float, bool, bytes, type(None)})


def collected(records: Iterable[Record]) -> Sequence[Record]:
    """The records as a list, or on disk above `LARGEST_IN_MEMORY`. Raises DataError if the disk is full."""
    iterator = iter(records)
    kept: list[Record] = []
    size = 0
    for record in iterator:
        kept.append(record)
        size += len(_encoded(record) or b"")
        if size > LARGEST_IN_MEMORY:
            return OnDisk(chain(kept, iterator))
    return kept


def portions(items: Iterable[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """The items in order, in lists of at most PORTION_ITEMS that end where their sizes pass PORTION_SIZE."""
    portion: list[Item] = []
    total = 0
    for item in items:
        portion.append(item)
        total += size(item)
        if len(portion) == PORTION_ITEMS or total > PORTION_SIZE:
            yield portion
            portion, total = [], 0
    if portion:
        yield portion


class OnDisk(Sequence[Record]):
    """Records in a file; memory holds one number for each. Several threads may read it at the same time.

    A record with other values than plain ones, for example an array from a user's function, is kept in memory.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        """Raises DataError if the disk is full."""
        folder = _folder()
        file = tempfile.TemporaryFile(dir=folder, prefix="proximo-", buffering=0)  # noqa: SIM115 - open while it is read
        weakref.finalize(self, file.close)
        self._file = file.fileno()
        self._ends = array("q", [0])
        self._others: dict[int, Record] = {}
        self._kind: type[Record] | None = None
        buffer = bytearray()
        try:
            for index, record in enumerate(records):
                self._kind = self._kind or type(record)
                content = _encoded(record) if type(record) is self._kind else None
                if content is None:
                    self._others[index] = record
                buffer += content or b""
                self._ends.append(self._ends[-1] + len(content or b""))
                if len(buffer) >= _WRITTEN_AT_ONCE:
                    _write(self._file, buffer)
                    buffer = bytearray()
            _write(self._file, buffer)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise DataError(
                f"the data do not fit into memory, and {folder} has no room for their temporary file: make room "
                "there, or name another folder in TMPDIR"
            ) from error

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"there are {len(self)} records, and none at {index}")
        if position in self._others:
            return self._others[position]
        start, end = self._ends[position], self._ends[position + 1]
        assert self._kind is not None
        return self._kind(**dict(zip(_names(self._kind), marshal.loads(_read(self._file, start, end)), strict=True)))


def _encoded(record: Any) -> bytes | None:
    """The values as bytes; None if marshal would change one of them, or they are nested too deeply for it."""
    values = [getattr(record, name) for name in _names(type(record))]
    try:
        return marshal.dumps(values, 2) if _is_plain(values) else None
    except RecursionError:
        return None


def _is_plain(value: Any) -> bool:
    """Whether a value consists of exactly the built-in types: marshal would change arrays and subclasses."""
    if type(value) in (list, tuple):
        return set(map(type, value)) <= _PLAIN or all(map(_is_plain, value))
    if type(value) is dict:
        return set(map(type, value)) <= _PLAIN and all(map(_is_plain, value.values()))
    return type(value) in _PLAIN


_NAMES: dict[type, tuple[str, ...]] = {}


def _names(kind: Any) -> tuple[str, ...]:
    if kind not in _NAMES:
        _NAMES[kind] = tuple(field.name for field in fields(kind))
    return _NAMES[kind]


def _folder() -> Path:
    """TMPDIR, else /var/tmp, which is on disk; /tmp may be in memory."""
    large = Path("/var/tmp")
    return large if "TMPDIR" not in os.environ and os.access(large, os.W_OK) else Path(tempfile.gettempdir())


def _write(file: int, content: bytearray) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(file, view) :]


def _read(file: int, start: int, end: int) -> bytes:
    content = os.pread(file, end - start, start)
    while len(content) < end - start:
        more = os.pread(file, end - start - len(content), start + len(content))
        if not more:
            raise OSError(errno.EIO, "the temporary file of the data is shorter than what was written")
        content += more
    return content
