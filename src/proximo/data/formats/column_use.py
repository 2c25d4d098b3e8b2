"""Reads rows and counts, as remarks, the columns that no reader used."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
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
        cells, key = _Cells(row), row.name or row.source
        if key not in readers:
            readers[key] = reader_of(replace(row, values=_Cells(row)))
        made = readers[key](replace(row, values=cells, from_text=cells.from_text))
        remarks.update(Remark(row.source, "messages read from JSON text in", name) for name in cells.from_text)
        if others_used is not None:
            used = {*cells.asked, *others_used, *row.used}
            unused = (name for name in row.values if name not in used and _has_content(row.values[name]))
            remarks.update(Remark(row.source, "columns not used", name) for name in unused)
        yield made


def _has_content(value: Any) -> bool:
    """False for the values by which tables mark an empty cell."""
    return value is not None and value != "" and not (isinstance(value, list | tuple | dict) and not value)


class _Cells(dict[str, Any]):
    """Cells that record the columns that were read. JSON text of messages becomes messages as it is read.

    Testing with `in` is not recorded.
    """

    def __init__(self, row: Row) -> None:
        super().__init__(row.values)
        self._row = row
        self.asked: set[str] = set()
        self.from_text: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        if name not in self.asked:
            self.asked.add(name)
            may_be_messages = self._asks_in_messages() if name in ANSWERS else name in _CONVERSATIONS
            messages = written_messages(self._row, name) if may_be_messages and name in self else None
            if messages is not None:
                self[name] = messages
                self.from_text.add(name)
        return super().__getitem__(name)

    def get(self, name: Any, default: Any = None, /) -> Any:
        """The cell, recorded too."""
        return self[name] if name in self.keys() else default

    def _asks_in_messages(self) -> bool:
        """False if the response continues a text and is therefore text itself, even if it looks like messages."""
        name = next((name for name in ASKING if name in self), None)
        if name == "prompt":
            return not isinstance(self._row.values[name], str) or written_messages(self._row, name) is not None
        return name is not None
