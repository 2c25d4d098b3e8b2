"""Reads rows and remarks which columns nobody looked at. Not what the columns mean."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from proximo.data.formats.context_columns import refuse_media
from proximo.data.formats.messages import written_messages
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
    """What is made of each row by the reader for its source, which `reader_of` finds from the source's first row.

    JSON text of messages is read as messages. `remarks` gets that, and the columns with content that no reader asked
    for; `others_used` are looked at elsewhere, and None says that all are. Raises DataError naming the row.
    """
    readers: dict[str, Callable[[Row], Made]] = {}
    for given in rows:
        refuse_media(given)
        row = given
        if messages := written_messages(given):
            row = replace(given, values={**given.values, **messages}, from_text=frozenset(messages))
            remarks.update(Remark(row.source, "messages read from JSON text in", name) for name in messages)
        key = row.name or row.source
        if key not in readers:
            readers[key] = reader_of(row)
        watched = _Watched(row.values)
        made = readers[key](replace(row, values=watched))
        if others_used is not None:
            used = {*watched.asked, *others_used, *row.used}
            for name in row.values:
                if name not in used and _has_content(row.values[name]):
                    remarks[Remark(row.source, "columns not used", name)] += 1
        yield made


def _has_content(value: Any) -> bool:
    """False for what tables put where there is nothing."""
    return value is not None and value != "" and not (isinstance(value, list | tuple | dict) and not value)


class _Watched(Mapping[str, Any]):
    """The cells of a row, and which of them were asked for. Whether a column is there may be asked without a trace."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)
