"""Splits a cleaned answer into tokens."""

import re
from dataclasses import dataclass

from proximo_verifiers.maths.rational_functions import NotEvaluatedError, UnreadableError

MAX_DIGITS = 1000
"""Largest number of digits of a number, since converting longer ones is slow."""
MAX_EXPONENT = 1000
"""Largest exponent in scientific notation."""
LONGEST_PRODUCT = 3
"""Largest number of letters that are read as a product; a longer run is a word."""

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
    """A token. `kind` is number, repeating, letter, command or mark. A numeral with a base is a letter."""

    kind: str
    text: str
    spaced: bool
    """True if white space precedes it."""
    has_commas: bool = False
    """True for a number that was written with commas, such as 1,000."""


def has_groups(text: str) -> bool:
    """True if commas or spaces in the text may separate thousands."""
    return _GROUPED.search(text) is not None


def tokens_of(text: str, *, grouped: bool) -> list[Token]:
    """The tokens of a text. With `grouped`, 1,000 is a thousand, else two numbers.

    Raises UnreadableError for words, NotEvaluatedError for too many digits.
    """
    text, with_commas = _joined(text) if grouped else (text, frozenset())
    tokens: list[Token] = []
    position, spaced = 0, False
    while position < len(text):
        match = _TOKEN.match(text, position)
        assert match is not None, "every character is a token"
        kind, piece, position = str(match.lastgroup), match[0], match.end()
        if kind == "space":
            spaced = True
            continue
        if kind == "word":
            position = _add_letters(tokens, piece, spaced, text, position)
        else:
            tokens.append(_token(kind, piece, spaced, match.start() in with_commas))
        spaced = False
    return tokens


def _joined(text: str) -> tuple[str, frozenset[int]]:
    """The text without separators of thousands, and where the numbers begin in it that had commas."""
    pieces, starts, end, length = [], set(), 0, 0
    for match in _GROUPED.finditer(text):
        digits = match[0].replace(",", "").replace(" ", "")
        length += match.start() - end
        if "," in match[0]:
            starts.add(length)
        pieces += [text[end : match.start()], digits]
        end, length = match.end(), length + len(digits)
    return "".join([*pieces, text[end:]]), frozenset(starts)


def _token(kind: str, piece: str, spaced: bool, has_commas: bool) -> Token:
    if kind in ("number", "repeating") and len(piece) > MAX_DIGITS:
        raise NotEvaluatedError(f"a number of more than {MAX_DIGITS} digits")
    exponent = piece.lower().partition("e")[2].partition("_")[0].lstrip("+-") if kind == "number" else ""
    if exponent and int(exponent) > MAX_EXPONENT:
        raise NotEvaluatedError(f"an exponent above {MAX_EXPONENT}")
    if kind == "number" and "_" in piece:
        return Token("letter", piece.replace("{", "").replace("}", ""), spaced, has_commas)
    return Token(kind, piece.replace(" ", ""), spaced, has_commas)


def _add_letters(tokens: list[Token], word: str, spaced: bool, text: str, end: int) -> int:
    """Adds the letters of a product, the last with its subscript, and returns the position after them."""
    if len(word) > LONGEST_PRODUCT:
        raise UnreadableError("words")
    if (subscript := _SUBSCRIPT.match(text, end)) is not None:
        end = subscript.end()
    for number, name in enumerate(word):
        last = number == len(word) - 1
        index = f"_{subscript[1] or subscript[2]}" if last and subscript else ""
        tokens.append(Token("letter", name + index, spaced and number == 0))
    return end
