"""The values that a text may mean: with its last word as a unit or not, 1,000 as one number or two. Not which is right.

A text has few readings, and two answers are the same where any two of their readings are.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from proximo.rewards.maths.cleaning import clean
from proximo.rewards.maths.grammar import Parser
from proximo.rewards.maths.lexer import Token, has_groups, tokens_of
from proximo.rewards.maths.quotients import Quotient, RefusedError, UnreadableError
from proximo.rewards.maths.values import Several, Value
from proximo.rewards.maths.words import without_unit


@dataclass(frozen=True, slots=True)
class Readings:
    """What a text may mean."""

    values: tuple[Value, ...]
    """None where it is outside the grammar."""
    refused: str = ""
    """Why it is computed by nobody, where it is not."""


@lru_cache(maxsize=4096)
def readings(text: str, *, percent: bool) -> Readings:
    """The readings of a text. `percent`: 50% is a half, or 50; otherwise it is 50 alone."""
    cleaned = clean(text)
    bare = without_unit(cleaned)
    values, refused = [], ""
    for each in (cleaned,) if bare is None else (bare, cleaned):
        for grouped in (True, False) if has_groups(each) else (False,):
            for hundredth in (Fraction(1, 100), Fraction(1)) if percent and "%" in each else (Fraction(1),):
                try:
                    values.append(_value(tokens_of(each, grouped=grouped), hundredth))
                except RefusedError as error:
                    refused = str(error)
                except UnreadableError:
                    continue
    return Readings(tuple(values), refused)


def _value(tokens: list[Token], percent: Fraction) -> Value:
    signs = (1, -1) if any(token.text == "\\pm" for token in tokens) else (1,)
    found = [Parser(tokens, sign=sign, percent=percent).answer() for sign in signs]
    return found[0] if len(found) == 1 else _either(*found)


def _either(plus: Value, minus: Value) -> Several:
    """Both values of a text with a plus-minus sign, as a list; those of a set as a set."""
    match plus, minus:
        case Several(opening=("" | "{") as opening), Several():
            return Several(opening, plus.items + minus.items, plus.closing)
        case Quotient(), Quotient():
            return Several("", (plus, minus), "")
    raise UnreadableError("a plus-minus sign in this place")
