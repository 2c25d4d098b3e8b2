"""Loads records from rows in portions, so that memory holds the texts and tokens of one portion."""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from proximo.data.formats.prompt_response import Exchange, Messages, in_form
from proximo.data.large_lists import collected, portions
from proximo.data.load_report import LoadReport, Remark
from proximo.data.rendering import Fitted, LoadOptions, count_unread, encode_exchanges, fit
from proximo.data.rows import Row, check_row_ids, num_distinct
from proximo.data.templates.chat import Learned
from proximo.data.tokenise import TextEncoder
from proximo.errors import DataError

Item = TypeVar("Item")
Key = TypeVar("Key")
Record = TypeVar("Record")
Converted = tuple[Sequence[Record], LoadReport]
"""The records of a portion, and what was kept and lost."""


def load_in_portions(
    rows: Sequence[Row],
    read: Callable[[Counter[Remark]], Iterable[Item]],
    size: Callable[[Item], int],
    convert: Callable[[list[Item]], Converted[Record]],
    *,
    what: str,
    limit: int | None,
    rest: Callable[[], Converted[Record]] | None = None,
) -> Converted[Record]:
    """All records, on disk if they are many (`large_lists.py`), and the report of the load.

    `read` gives the items of the rows and counts remarks, `size` the characters of one. `rest`: records that remain
    after the last portion. `what`: the name of a record in the error if none is left, with the `limit` of its tokens.
    Raises DataError, also for an id of two rows.
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
    report += LoadReport(remarks=remarks)
    if not kept:
        raise DataError(f"no {what} is left: {report} (max_tokens {limit})")
    return kept, report


def load_exchanges(
    rows: Sequence[Row],
    encoder: TextEncoder,
    options: LoadOptions,
    read: Callable[[Counter[Remark]], Iterable[tuple[Key, Exchange | None]]],
    make: Callable[[Key, Fitted], Record],
    *,
    what: str,
    learned: Learned = "last",
    min_words: int = 0,
) -> Converted[Record]:
    """The records that `make` gives for the exchanges of the rows that fit, in their order; None counts as a tie.

    Dropped and counted are ties, responses of fewer than `min_words` words, two equal responses, responses without a
    `learned` token, and what is too long. `what`, and errors: see `load_in_portions`.
    """
    hashes = array("q")

    def convert(portion: list[tuple[Key, Exchange | None]]) -> Converted[Record]:
        fitted, report = _fitted(encoder, portion, options, learned, min_words)
        found = (each.encoded for _, each in fitted)
        hashes.extend(hash((item.prompt.ids, *(response.ids for response in item.responses))) for item in found)
        return [make(key, each) for key, each in fitted], report

    records, report = load_in_portions(
        rows,
        read,
        lambda item: 0 if item[1] is None else item[1].num_characters,
        convert,
        what=what,
        limit=options.max_tokens,
    )
    return records, replace(report, num_duplicates=len(records) - num_distinct(hashes))


def _fitted(
    encoder: TextEncoder,
    portion: Sequence[tuple[Key, Exchange | None]],
    options: LoadOptions,
    learned: Learned,
    min_words: int,
) -> tuple[list[tuple[Key, Fitted]], LoadReport]:
    given = [(key, exchange) for key, exchange in portion if exchange is not None]
    long = [pair for pair in given if all(_num_words(each) >= min_words for each in pair[1].responses)]
    exchanges = in_form([each for _, each in long], to_messages=options.as_messages, system=options.system)
    rendered, encoded = encode_exchanges(encoder, exchanges, learned=learned)
    rows = zip((key for key, _ in long), exchanges, encoded, strict=True)
    differing = [
        row for row in rows if len(row[2].responses) != 2 or row[2].responses[0].ids != row[2].responses[1].ids
    ]
    learnable = [row for row in differing if learned == "last" or all(any(each.written) for each in row[2].responses)]
    kept = [
        (key, found)
        for key, exchange, item in learnable
        if (found := fit(encoder, exchange, item, options, learned)) is not None
    ]
    merges, checked = encoder.count_merges(rendered, encoded)
    report = LoadReport(
        num_rows=len(portion),
        num_kept_rows=len(kept),
        num_ties=len(portion) - len(given),
        num_too_short=len(given) - len(long),
        num_identical_pairs=len(long) - len(differing),
        num_without_targets=len(differing) - len(learnable),
        num_too_long=len(learnable) - len(kept),
        num_truncated=sum(found.is_truncated for _, found in kept),
        num_empty_responses=sum(not response for _, found in kept for response in found.exchange.responses),
        num_merged_boundaries=merges,
        num_checked_boundaries=checked,
        unwritable=encoder.unwritable(rendered),
        unread=count_unread(rendered),
        num_tokens=sum(found.num_tokens for _, found in kept),
    )
    return kept, report


def _num_words(response: str | Messages) -> int:
    if isinstance(response, str):
        return len(response.split())
    return sum(len(turn["content"].split()) for turn in response if turn["role"] == "assistant")
