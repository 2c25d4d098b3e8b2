"""Where in a response its answer stands. Not what the answer means.

Every search is one pass over the text; only a pattern of the user's own may take longer, and the worker's deadline ends
it.
"""

import re
from collections.abc import Callable, Sequence
from itertools import zip_longest

_PIECE = re.compile(
    r"\\(?:boxed|fbox)\s*(?P<box>\{)|\\(?:boxed|fbox)\s+(?P<token>[^\s{}$\\][^\s{}$]*)|\\[{}\\]|(?P<brace>[{}])"
)
_HASH = re.compile(r"####[ \t]*([^\n#]*)")
# Bold, too: **Answer:** 5 and **Answer**: 5.
_PHRASE = re.compile(
    r"\b(?:answer|result|(?:correct|right|best)\s(?:option|choice))\**(?:\sto\s(?:the|this|your)\s(?:question|problem))?"
    r"\s*(?:(?:is|was|equals|(?:should|would|must|will)\sbe)\b|:|=)\**(?:\s*:|\s+equal\s+to)?",
    re.IGNORECASE,
)
_REMARK = re.compile(
    r"(?:,\s*|\s+)(?:because|since|as|so|thus|hence|therefore|which|where|when|while|whenever|if|for|but|and\s(?:not|so|thus|hence|therefore|it))\b"
    r"|,\s*not\b|\s*(?:\N{RIGHTWARDS ARROW}|\N{EM DASH}|\\implies|\\Rightarrow|</)"
)
"""Where a sentence stops stating its answer and goes on to explain it."""
_MONEY = re.compile(r"\$\d[\d,.]*[\s.,;]+[a-z]{2,}\s[^$]*\s\$")
_TAGS = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_SENTENCE_END = re.compile(r"\n|[.;!?](?=\s|$)|\*\*")
_LABEL = re.compile(r"^[ \t]*A:[ \t]*(.*)$", re.MULTILINE)
_NUMBER = re.compile(r"(?<![\w.])-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?(?:\s*\\?%)?", re.ASCII)
_MATHS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"))
_OPENINGS = tuple(opening for opening, _ in _MATHS)
LONGEST_PHRASE = 500
"""Characters behind `the answer is` in which the answer must end."""


def answers_in(text: str, answer_from: Sequence[str], pattern: re.Pattern[str] | None = None) -> list[str]:
    """The answers of the first place of `answer_from` that has any, in their order in the text."""
    for place in answer_from:
        found = [] if place == "pattern" and pattern is None else FINDERS[place](text, pattern)
        found = [each.strip() for each in found if each.strip()]
        if found:
            return found
    return []


def boxed(text: str) -> list[str]:
    """The contents of every box that is closed and not inside another one."""
    found: list[tuple[int, int, int, int]] = []
    opened: list[tuple[int, int] | None] = []
    for match in _PIECE.finditer(text):
        if match["token"]:
            last = match.start("token") + len(match["token"].rstrip(".,;:"))
            found.append((match.start(), match.end(), match.start("token"), last))
        elif match["box"]:
            opened.append((match.start(), match.end()))
        elif match["brace"] == "{":
            opened.append(None)
        elif match["brace"] == "}" and opened and (box := opened.pop()) is not None:
            found.append((box[0], match.end(), box[1], match.start()))
    # Only what is kept is copied: boxes in boxes would hold their text once for each.
    return [text[first:last] for first, last in _outermost(found)]


def _outermost(found: list[tuple[int, int, int, int]]) -> list[tuple[int, int]]:
    """Of boxes (start, end, start of the contents, end of the contents) the contents of those in no other."""
    kept: list[tuple[int, int]] = []
    end = -1
    for start, stop, first, last in sorted(found):
        if start >= end:
            kept.append((first, last))
            end = stop
    return kept


def _behind_phrase(text: str) -> list[str]:
    """What follows `the answer is`, up to the end of its formula or sentence."""
    found = []
    matches = list(_PHRASE.finditer(text))
    for match, following in zip_longest(matches, matches[1:]):
        end = len(text) if following is None else following.start()
        rest = text[match.end() : min(end, match.end() + LONGEST_PHRASE)].lstrip(" \t:")
        below = rest.lstrip()
        if rest.startswith("\n") and (match[0].rstrip("*")[-1] == ":" or below.startswith(_OPENINGS)):
            rest = below  # the answer has a line of its own
        stated = _formula(rest)
        remark = _REMARK.search(stated)
        found.append(stated[: remark.start()] if remark else stated)
    return found


def _formula(rest: str) -> str:
    """Up to the end of the formula in which it begins; else of the sentence."""
    for opening, closing in _MATHS:
        if rest.startswith(opening) and not _MONEY.match(rest):
            end = rest.find(closing, len(opening))
            if end > 0:
                return rest[len(opening) : end]
    end = _SENTENCE_END.search(rest)
    return rest[: end.start()] if end else rest


def _pattern(text: str, pattern: re.Pattern[str]) -> list[str]:
    return [(match[1] if pattern.groups else match[0]) or "" for match in pattern.finditer(text)]


FINDERS: dict[str, Callable[..., list[str]]] = {
    "boxed": lambda text, _: boxed(text),
    "tags": lambda text, _: _TAGS.findall(text),
    "hash": lambda text, _: _HASH.findall(text),
    "phrase": lambda text, _: _behind_phrase(text),
    "label": lambda text, _: _LABEL.findall(text),
    "number": lambda text, _: [found.rstrip(",") for found in _NUMBER.findall(text)],
    "pattern": _pattern,
    "response": lambda text, _: [text],
}
PLACES = tuple(FINDERS)
"""Where an answer may be looked for."""
