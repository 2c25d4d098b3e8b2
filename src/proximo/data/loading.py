"""Loads records from rows in portions, so that memory holds the texts and tokens of one portion."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from proximo.data.large_lists import collected, portions
from proximo.data.load_report import LoadReport, Remark
from proximo.data.rows import Row, check_row_ids

Item = TypeVar("Item")
Record = TypeVar("Record")
Converted = tuple[Sequence[Record], LoadReport]
"""The records of a portion, and what was kept and lost."""


def load_in_portions(
    rows: Sequence[Row],
    read: Callable[[Counter[Remark]], Iterable[Item]],
    size: Callable[[Item], int],
    convert: Callable[[list[Item]], Converted[Record]],
    *,
    rest: Callable[[], Converted[Record]] | None = None,
) -> Converted[Record]:
    """All records, on disk if they are many (`large_lists.py`), and the report of the load.

    `read` gives the items of the rows and counts remarks, `size` the characters of one. `rest`: records that remain
    after the last portion. Raises DataError for an id of two rows.
    """
    check_row_ids(rows)
    remarks: Counter[Remark] = Counter()
    report = LoadReport()

    def records() -> Iterator[Record]:
        nonlocal report
        for portion in portions(read(remarks), size):
            found, counts = convert(portion)
            report += counts
            yield from found
        if rest is not None:
            found, counts = rest()
            report += counts
            yield from found

    kept = collected(records())
    return kept, report + LoadReport(remarks=remarks)
