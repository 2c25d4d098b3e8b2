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
    for given in rows:
        refuse_media(given)
        row, key = _with_messages(given), given.name or given.source
        if key not in readers:
            readers[key] = reader_of(row)
        cells = _Cells(row.values)
        made = readers[key](replace(row, values=cells))
        remarks.update(
            Remark(row.source, "messages read from JSON text in", name) for name in row.from_text if name in cells.asked
        )
        if others_used is not None:
            used = {*cells.asked, *others_used, *row.used}
            unused = (name for name in row.values if name not in used and _has_content(row.values[name]))
            remarks.update(Remark(row.source, "columns not used", name) for name in unused)
        yield made


def _has_content(value: Any) -> bool:
    """False for the values by which tables mark an empty cell."""
    return value is not None and value != "" and not (isinstance(value, list | tuple | dict) and not value)


def _with_messages(row: Row) -> Row:
    """The row with messages in place of JSON text of them."""
    found = _messages_in(row, (*ASKING, "chosen", "rejected"))
    asking = next((name for name in ASKING if name in row.values), None)
    # The response that continues a text is text itself, even if it looks like messages.
    if asking is not None and (asking in found or asking != "prompt" or not isinstance(row.values[asking], str)):
        found |= _messages_in(row, ANSWERS)
    return replace(row, values={**row.values, **found}, from_text=found.keys()) if found else row


def _messages_in(row: Row, names: Iterable[str]) -> dict[str, Any]:
    read = {name: written_messages(row, name) for name in names if name in row.values}
    return {name: messages for name, messages in read.items() if messages is not None}


class _Cells(dict[str, Any]):
    """Cells that record the columns that were read. Testing with `in` is not recorded."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        return super().__getitem__(name)

    def get(self, name: object, default: Any = None, /) -> Any:
        """The cell, recorded too."""
        self.asked.add(str(name))
        return super().get(str(name), default)
