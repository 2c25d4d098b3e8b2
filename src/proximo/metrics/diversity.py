"""How much a set of answers repeats itself. Not a judgement of any one answer."""

from collections.abc import Iterable, Sequence


def distinct_fraction(responses: Iterable[Sequence[int]], *, n: int = 2) -> float | None:
    """Different runs of `n` neighbouring tokens over all of them, across responses (arXiv:1510.03055, distinct-n).

    None where no response has `n` tokens. The figure falls as the number of tokens grows, so it compares only sets of
    about the same size.
    """
    seen: set[tuple[int, ...]] = set()
    total = 0
    for token_ids in responses:
        for start in range(len(token_ids) - n + 1):
            seen.add(tuple(token_ids[start : start + n]))
            total += 1
    return len(seen) / total if total else None


def repeated_fraction(token_ids: Sequence[int], *, n: int = 4) -> float:
    """Share of the runs of `n` neighbouring tokens of one response that stood in it before; 0 below n + 1 tokens.

    1 - different runs / runs: 0 where no run comes twice, near 1 for a response that goes round in a circle.
    """
    runs = [tuple(token_ids[start : start + n]) for start in range(len(token_ids) - n + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0
