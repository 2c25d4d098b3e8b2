"""Reads rows and counts, as remarks, the columns that no reader used."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from proximo.data.formats.context_columns import refuse_media
from proximo.data.formats.messages import ANSWERS, ASKING, written_messages
from proximo.data.load_report import Remark
from proximo.data.rows import Row

Made = TypeVar("Made")

_CONVERSATIONS = frozenset({*ASKING, "chosen", "rejected"})
"""Columns besides the answers whose text may be messages."""


def read_by_source(
    rows: Iterable[Row],
    reader_of: Callable[[Row], Callable[[Row], Made]],
    remarks: Counter[Remark],
    *,
    others_used: Collection[str] | None = ("id",),
) -> Iterator[Made]:
    """Yields the result of its source's reader for each row; `reader_of` chooses it by the source's first row.

    JSON text of messages is read as messages; in answers only if the prompt is a conversation. `remarks` counts that,
    and columns with content that no reader used. `others_used`: columns that are used elsewhere; None means all.
    Raises DataError naming the row.
    """
    readers: dict[str, Callable[[Row], Made]] = {}
    for row in rows:
        refuse_media(row)
        key = row.name or row.source
        if key not in readers:
            readers[key] = reader_of(replace(row, values=_Cells(row)))
        cells = _Cells(row)
        made = readers[key](replace(row, values=cells, from_text=cells.from_text))
        remarks.update(Remark(row.source, "messages read from JSON text in", name) for name in cells.written())
        if others_used is not None:
            used = {*cells.asked, *others_used, *row.used}
            for name in row.values:
                if name not in used and _has_content(row.values[name]):
                    remarks[Remark(row.source, "columns not used", name)] += 1
        yield made


def _has_content(value: Any) -> bool:
    """False for the values by which tables mark an empty cell."""
    return value is not None and value != "" and not (isinstance(value, list | tuple | dict) and not value)


class _Cells(Mapping[str, Any]):
    """The cells of a row, which records the columns that were read. Testing with `in` is not recorded."""

    def __init__(self, row: Row) -> None:
        self._row = row
        self._messages: dict[str, Any] = {}
        """Column that was read -> the messages in its text; None if it holds none."""
        self.from_text: set[str] = set()
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        value = self._row.values[name]
        self.asked.add(name)
        may_be_messages = self._asks_in_messages() if name in ANSWERS else name in _CONVERSATIONS
        messages = self._read(name) if may_be_messages else None
        return value if messages is None else messages

    def __contains__(self, name: object) -> bool:
        return name in self._row.values

    def __iter__(self) -> Iterator[str]:
        return iter(self._row.values)

    def __len__(self) -> int:
        return len(self._row.values)

    def written(self) -> list[str]:
        """The columns whose text was read as messages."""
        return [name for name in self._messages if name in self.from_text & self.asked]

    def _asks_in_messages(self) -> bool:
        """False if the response continues a text and is therefore text itself, even if it looks like messages."""
        name = next((name for name in ASKING if name in self), None)
        if name == "prompt":
            return not isinstance(self._row.values[name], str) or self._read(name) is not None
        return name is not None

    def _read(self, name: str) -> Any:
        if name not in self._messages:
            self._messages[name] = written_messages(self._row, name)
            self.from_text |= set() if self._messages[name] is None else {name}
        return self._messages[name]
