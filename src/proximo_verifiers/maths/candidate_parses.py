"""The values that an ambiguous text may have: with its last word as a unit or not, 1,000 as one number or as two.

Two answers are equal if any value of one equals any value of the other.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from proximo_verifiers.maths.answer_types import Several, Value
from proximo_verifiers.maths.cleaning import clean
from proximo_verifiers.maths.grammar import Parser
from proximo_verifiers.maths.lexer import Token, has_groups, tokens_of
from proximo_verifiers.maths.rational_functions import Arithmetic, NotEvaluatedError, RationalFunction, UnreadableError
from proximo_verifiers.maths.spelled import as_mixed_number
from proximo_verifiers.maths.units import without_unit

_WRAPPER = re.compile(r"\\(?:boxed|fbox|displaystyle|textstyle)(?![A-Za-z])")
"""What cleaning drops, and the braces around its argument stay."""


@dataclass(frozen=True, slots=True)
class CandidateParses:
    """The possible values of a text."""

    values: tuple[Value, ...]
    """Empty if the text is outside the grammar."""
    refused: str = ""
    """The reason for refusing to evaluate the text, if it was refused."""


@lru_cache(maxsize=1024)
def candidate_parses(text: str, *, percent: bool) -> CandidateParses:
    """Parses a text in every plausible way. With `percent`, 50% may be 0.5 or 50, otherwise it is 50."""
    arithmetic = Arithmetic()  # one budget for all candidates
    values: list[Value] = []
    has_sets = _WRAPPER.search(text) is None
    try:
        for variant in dict.fromkeys((text, as_mixed_number(text))):
            for tokens, percent_factor in _tokenisations(clean(variant), percent=percent):
                with suppress(UnreadableError):
                    values.append(_value(tokens, percent_factor, has_sets, arithmetic))
    except NotEvaluatedError as error:
        return CandidateParses(tuple(values), str(error))
    return CandidateParses(tuple(values))


def _tokenisations(cleaned: str, *, percent: bool) -> Iterator[tuple[list[Token], Fraction]]:
    """(tokens, factor of a percent sign) for each way to cut the text into tokens."""
    bare = without_unit(cleaned)
    for text in (cleaned,) if bare is None else (bare, cleaned):
        factors = (Fraction(1, 100), Fraction(1)) if percent and "%" in text else (Fraction(1),)
        for grouped in (True, False) if has_groups(text) else (False,):
            with suppress(UnreadableError):
                tokens = tokens_of(text, grouped=grouped)
                yield from ((tokens, factor) for factor in factors)


def _value(tokens: list[Token], percent: Fraction, has_sets: bool, arithmetic: Arithmetic) -> Value:
    signs = (1, -1) if any(token.text == "\\pm" for token in tokens) else (1,)
    values = [
        Parser(tokens, sign=sign, percent=percent, has_sets=has_sets, arithmetic=arithmetic).answer() for sign in signs
    ]
    return values[0] if len(values) == 1 else _both_signs(*values)


def _both_signs(plus: Value, minus: Value) -> Several:
    """Both values of a text with a plus-minus sign: as a list, or as a set if they are sets."""
    match plus, minus:
        case Several(opening=("" | "{") as opening), Several():
            return Several(opening, plus.items + minus.items, plus.closing)
        case RationalFunction(), RationalFunction():
            return Several("", (plus, minus), "")
    raise UnreadableError("an unexpected plus-minus sign")
