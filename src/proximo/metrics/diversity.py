"""Diversity and repetition of responses, by n-grams of tokens."""

from collections.abc import Iterable, Sequence


def distinct_fraction(responses: Iterable[Sequence[int]], *, n: int = 2) -> float | None:
    """Distinct-n: distinct n-grams divided by all n-grams, over all responses together (arXiv:1510.03055).

    None if no response has `n` tokens. The value falls as the number of tokens grows, so compare only sets of about the
    same size.
    """
    seen: set[tuple[int, ...]] = set()
    total = 0
    for token_ids in responses:
        for start in range(len(token_ids) - n + 1):
            seen.add(tuple(token_ids[start : start + n]))
            total += 1
    return len(seen) / total if total else None


def repeated_fraction(token_ids: Sequence[int], *, n: int = 4) -> float:
    """Share of a response's n-grams that repeat an earlier one: 1 - distinct / all. 0 below n + 1 tokens.

    0 if no n-gram occurs twice, near 1 for a response that loops.
    """
    ngrams = [tuple(token_ids[start : start + n]) for start in range(len(token_ids) - n + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
