"""Where in a response its answer stands. Not what the answer means.

Every search is one pass over the text; only a pattern of the user's own may take longer, and the worker's deadline ends
it.
"""

import re
from collections.abc import Callable, Sequence

_PIECE = re.compile(
    r"\\(?:boxed|fbox)\s*(?P<box>\{)|\\(?:boxed|fbox)\s+(?P<token>[^\s{}$\\][^\s{}$]*)|\\[{}\\]|(?P<brace>[{}])"
)
_HASH = re.compile(r"####[ \t]*([^\n#]*)")
# Bold, too: **Answer:** 5 and **Answer**: 5.
_PHRASE = re.compile(r"\b(?:answer|result)\**\s*(?:is|was|:|=)\**(?:\s*:|\s+equal\s+to)?", re.IGNORECASE)
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
        found = [] if place == "pattern" and pattern is None else _FINDERS[place](text, pattern)
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
    for match in _PHRASE.finditer(text):
        rest = text[match.end() : match.end() + LONGEST_PHRASE].lstrip(" \t:")
        below = rest.lstrip()
        if rest.startswith("\n") and (match[0].rstrip("*")[-1] == ":" or below.startswith(_OPENINGS)):
            rest = below  # the answer has a line of its own
        found.append(_formula(rest))
    return found


def _formula(rest: str) -> str:
    for opening, closing in _MATHS:
        if rest.startswith(opening):
            end = rest.find(closing, len(opening))
            if end > 0:
                return rest[len(opening) : end]
    end = _SENTENCE_END.search(rest)
    return rest[: end.start()] if end else rest


def _pattern(text: str, pattern: re.Pattern[str]) -> list[str]:
    return [(match[1] if pattern.groups else match[0]) or "" for match in pattern.finditer(text)]


_FINDERS: dict[str, Callable[..., list[str]]] = {
    "boxed": lambda text, _: boxed(text),
    "hash": lambda text, _: _HASH.findall(text),
    "phrase": lambda text, _: _behind_phrase(text),
    "label": lambda text, _: _LABEL.findall(text),
    "number": lambda text, _: [found.rstrip(",") for found in _NUMBER.findall(text)],
    "pattern": _pattern,
    "whole": lambda text, _: [text],
}
PLACES = tuple(_FINDERS)
"""Where an answer may be looked for."""
