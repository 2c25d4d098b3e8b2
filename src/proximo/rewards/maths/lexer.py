"""A cleaned answer cut into tokens. Not what they mean together: that is grammar.py."""

import re
from dataclasses import dataclass

from proximo.rewards.maths.rational_functions import RefusedError, UnreadableError

MAX_DIGITS = 1000
"""Of one number, so that none is built that takes long to build."""
MAX_EXPONENT = 1000
"""Of ten, in scientific notation."""
LONGEST_PRODUCT = 3
"""A longer run of letters is a word, not a product."""

_TOKEN = re.compile(
    r"""(?P<space>\s+)
    |(?P<repeating>\d*\.\d*\\overline\s*\{\d+\})
    |(?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?(?:_(?:\{\d+\}|\d+))?)
    |(?P<command>\\(?:begin|end)\s*\{[pb]?matrix\}|\\[A-Za-z]+|\\[{}|])
    |(?P<word>[A-Za-z]+)
    |(?P<mark>.)""",
    re.VERBOSE | re.ASCII | re.DOTALL,
)
_GROUPED = re.compile(r"(?<![\d.])\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+)(?!\d|,\d)", re.ASCII)
_SUBSCRIPT = re.compile(r"_(?:\{(\w+)\}|([A-Za-z0-9]))", re.ASCII)


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of an answer. `kind` is number, repeating, letter, command or mark; a based number is a letter."""

    kind: str
    text: str
    spaced: bool
    """White space stands before it."""


def has_groups(text: str) -> bool:
    """Whether commas or spaces in the text may separate thousands."""
    return _GROUPED.search(text) is not None


def tokens_of(text: str, *, grouped: bool) -> list[Token]:
    """The tokens; `grouped` reads 1,000 as a thousand, and not as two numbers.

    Raises UnreadableError for words, and RefusedError beyond the bounds on digits.
    """
    if grouped:
        text = _GROUPED.sub(lambda found: found[0].replace(",", "").replace(" ", ""), text)
    found: list[Token] = []
    place, spaced = 0, False
    while place < len(text):
        match = _TOKEN.match(text, place)
        assert match is not None, "every character is a token"
        kind, piece, place = str(match.lastgroup), match[0], match.end()
        if kind == "space":
            spaced = True
            continue
        if kind == "word":
            place = _add_letters(found, piece, spaced, text, place)
        else:
            found.append(_token(kind, piece, spaced))
        spaced = False
    return found


def _token(kind: str, piece: str, spaced: bool) -> Token:
    if kind in ("number", "repeating") and len(piece) > MAX_DIGITS:
        raise RefusedError(f"a number of more than {MAX_DIGITS} digits")
    exponent = piece.lower().partition("e")[2].partition("_")[0].lstrip("+-") if kind == "number" else ""
    if exponent and int(exponent) > MAX_EXPONENT:
        raise RefusedError(f"an exponent above {MAX_EXPONENT}")
    if kind == "number" and "_" in piece:
        return Token("letter", piece.replace("{", "").replace("}", ""), spaced)
    return Token(kind, piece.replace(" ", ""), spaced)


def _add_letters(found: list[Token], word: str, spaced: bool, text: str, place: int) -> int:
    """Letters side by side are a product; the last may have a subscript. The place after them."""
    if len(word) > LONGEST_PRODUCT:
        raise UnreadableError("words")
    if (subscript := _SUBSCRIPT.match(text, place)) is not None:
        place = subscript.end()
    for position, name in enumerate(word):
        last = position == len(word) - 1
        index = f"_{subscript[1] or subscript[2]}" if last and subscript else ""
        found.append(Token("letter", name + index, spaced and position == 0))
    return place
