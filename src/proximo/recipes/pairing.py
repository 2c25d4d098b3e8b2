"""Preference pairs made from a labelled set, as a function source: `proximo.recipes.pairing:label_pairs`."""

from collections.abc import Iterator, Sequence
from math import lcm
from typing import Any

from proximo.data.formats.typed_columns import cell, text_cell
from proximo.data.order import shuffled
from proximo.data.readers.reading import read_source
from proximo.data.readers.source import DataSource
from proximo.data.rows import Row
from proximo.errors import DataError


def label_pairs(
    *,
    path: str,
    text: str = "text",
    label: str = "label",
    chosen: Any = 1,
    rejected: Any = 0,
    num_pairs: int | None = None,
    seed: int = 0,
) -> Iterator[dict[str, str]]:
    """Rows of `prompt` (""), `chosen` (a text labelled `chosen`) and `rejected` (one labelled `rejected`).

    No pair repeats, and all texts are used about equally often: pair k joins the k-th text of one shuffle with the k-th
    of the other, both cyclic. Without `num_pairs` each text is used at least once. Raises DataError for a missing
    column, a label that no row has, and more pairs than can be made.
    """
    rows = read_source(DataSource(path=path))
    better = _labelled(rows, text, label, wanted=chosen)
    worse = _labelled(rows, text, label, wanted=rejected)
    most = len(better) * len(worse)
    wanted = max(len(better), len(worse)) if num_pairs is None else num_pairs
    if not 1 <= wanted <= most:
        raise DataError(
            f"{path}: {wanted} pairs are wanted; {len(better)} texts labelled {chosen!r} and {len(worse)} labelled "
            f"{rejected!r} make 1 to {most}"
        )
    better_order = shuffled(len(better), seed=seed, purpose="chosen")
    worse_order = shuffled(len(worse), seed=seed, purpose="rejected")
    turn = lcm(len(better), len(worse))
    for pair in range(wanted):
        # After a common multiple of both lengths the pairs would repeat, so the offset moves by one.
        first = better[better_order[pair % len(better)]]
        second = worse[worse_order[(pair + pair // turn) % len(worse)]]
        yield {"prompt": "", "chosen": first, "rejected": second}


def _labelled(rows: Sequence[Row], text: str, label: str, *, wanted: Any) -> list[str]:
    texts = []
    for row in rows:
        # CSV gives labels as text, JSON as numbers.
        if str(cell(row, label)) == str(wanted):
            texts.append(text_cell(row, text))
    if not texts:
        labels = sorted({str(row.values[label]) for row in rows})
        raise DataError(f"{rows[0].source}: no row has {label} {wanted!r}; labels found: {', '.join(labels[:10])}")
    return texts
