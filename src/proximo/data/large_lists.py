"""Lists of records that may be larger than memory: above 16 MiB they are kept in a temporary Arrow file.

A record is a frozen dataclass of plain values: rows, examples, pairs, prompts. Both forms are read by position, so the
order of data and an exact resume do not depend on the form. The file has no name and ends with the process.
"""

import errno
import marshal
import mmap
import os
import tempfile
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
    """Records in an Arrow file that is mapped into memory. Several threads may read it at the same time.

    A record with other values than plain ones, for example an array from a user's function, is kept in memory.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        """Raises DataError if the disk is full."""
        import pyarrow

        self._others: dict[int, Record] = {}
        self._kind: type[Record] | None = None
        folder = _folder()
        schema = pyarrow.schema([("record", pyarrow.binary())])
        try:
            with tempfile.TemporaryFile(dir=folder, prefix="proximo-") as file:
                with pyarrow.ipc.new_stream(file, schema) as stream:
                    for contents in portions(self._contents(records), len):
                        stream.write_batch(pyarrow.record_batch([pyarrow.array(contents, pyarrow.binary())], schema))
                file.flush()
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise DataError(
                f"the data do not fit into memory, and {folder} has no room for their temporary file: make room "
                "there, or name another folder in TMPDIR"
            ) from error
        self._records = pyarrow.ipc.open_stream(pyarrow.py_buffer(mapped)).read_all()["record"]

    def _contents(self, records: Iterable[Record]) -> Iterator[bytes]:
        for index, record in enumerate(records):
            self._kind = self._kind or type(record)
            content = _encoded(record) if type(record) is self._kind else None
            if content is None:
                self._others[index] = record
            yield content or b""

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        if position in self._others:
            return self._others[position]
        assert self._kind is not None
        values = marshal.loads(self._records[position].as_buffer())
        return self._kind(**dict(zip(_names(self._kind), values, strict=True)))


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
