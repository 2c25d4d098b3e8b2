"""The values that a text may mean: with its last word as a unit or not, 1,000 as one number or two. Not which is right.

A text has few readings, and two answers are the same where any two of their readings are.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from proximo.rewards.maths.answer_types import Several, Value
from proximo.rewards.maths.cleaning import clean
from proximo.rewards.maths.grammar import Parser
from proximo.rewards.maths.lexer import Token, has_groups, tokens_of
from proximo.rewards.maths.rational_functions import Arithmetic, Quotient, RefusedError, UnreadableError
from proximo.rewards.maths.spelled import as_mixed_number
from proximo.rewards.maths.units import without_unit


@dataclass(frozen=True, slots=True)
class Readings:
    """What a text may mean."""

    values: tuple[Value, ...]
    """None where it is outside the grammar."""
    refused: str = ""
    """Why it is computed by nobody, where it is not."""


@lru_cache(maxsize=1024)
def readings(text: str, *, percent: bool) -> Readings:
    """The readings of a text. `percent`: 50% is a half, or 50; otherwise it is 50 alone."""
    arithmetic = Arithmetic()  # all readings together may cost as much as one
    values: list[Value] = []
    try:
        for written in dict.fromkeys((text, as_mixed_number(text))):
            for tokens, hundredth in _variants(clean(written), percent=percent):
                with suppress(UnreadableError):
                    values.append(_value(tokens, hundredth, arithmetic))
    except RefusedError as error:
        return Readings(tuple(values), str(error))
    return Readings(tuple(values))


def _variants(cleaned: str, *, percent: bool) -> Iterator[tuple[list[Token], Fraction]]:
    """Tokens, and what a percent sign multiplies by."""
    bare = without_unit(cleaned)
    for each in (cleaned,) if bare is None else (bare, cleaned):
        factors = (Fraction(1, 100), Fraction(1)) if percent and "%" in each else (Fraction(1),)
        for grouped in (True, False) if has_groups(each) else (False,):
            with suppress(UnreadableError):
                tokens = tokens_of(each, grouped=grouped)
                yield from ((tokens, factor) for factor in factors)


def _value(tokens: list[Token], percent: Fraction, arithmetic: Arithmetic) -> Value:
    signs = (1, -1) if any(token.text == "\\pm" for token in tokens) else (1,)
    found = [Parser(tokens, sign=sign, percent=percent, arithmetic=arithmetic).answer() for sign in signs]
    return found[0] if len(found) == 1 else _either(*found)


def _either(plus: Value, minus: Value) -> Several:
    """Both values of a text with a plus-minus sign, as a list; those of a set as a set."""
    match plus, minus:
        case Several(opening=("" | "{") as opening), Several():
            return Several(opening, plus.items + minus.items, plus.closing)
        case Quotient(), Quotient():
            return Several("", (plus, minus), "")
    raise UnreadableError("a plus-minus sign in this place")
