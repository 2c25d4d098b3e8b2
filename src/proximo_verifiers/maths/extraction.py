"""Finds the answer in a response.

Every search takes one pass over the text. Only a pattern of the user may take longer; the deadline of the worker ends
it.
"""

import re
from collections.abc import Callable, Sequence
from itertools import zip_longest

_PIECE = re.compile(
    r"\\(?:boxed|fbox)\s*(?P<box>\{)|\\(?:boxed|fbox)\s+(?P<token>[^\s{}$\\][^\s{}$]*)|\\[{}\\]|(?P<brace>[{}])"
)
_HASH = re.compile(r"####[ \t]*([^\n#]*)")
# Bold text as well: **Answer:** 5 and **Answer**: 5.
_PHRASE = re.compile(
    r"\b(?:answer|result|(?:correct|right|best)\s(?:option|choice))\**(?:\sto\s(?:the|this|your)\s(?:question|problem))?"
    r"\s*(?:(?:is|was|equals|(?:should|would|must|will)\sbe)\b|:|=)\**(?:\s*:|\s+equal\s+to)?",
    re.IGNORECASE,
)
_REMARK = re.compile(
    r"(?:,\s*|\s+)(?:because|since|as|so|thus|hence|therefore|which|where|when|while|whenever|if|for|but|and\s(?:not|so|thus|hence|therefore|it))\b"
    r"|,\s*not\b|\s*(?:\N{RIGHTWARDS ARROW}|\N{EM DASH}|\\implies|\\Rightarrow|</)"
)
"""The point in a sentence where the answer ends and an explanation begins."""
_MONEY = re.compile(r"\$\d[\d,.]*[\s.,;]+[a-z]{2,}\s[^$]*\s\$")
_TAGS = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_SENTENCE_END = re.compile(r"\n|[.;!?](?=\s|$)|\*\*")
_LABEL = re.compile(r"^[ \t]*A:[ \t]*(.*)$", re.MULTILINE)
_NUMBER = re.compile(r"(?<![\w.])-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?(?:\s*\\?%)?", re.ASCII)
_MATHS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"))
_OPENINGS = tuple(opening for opening, _ in _MATHS)
LONGEST_PHRASE = 500
"""Largest number of characters after `the answer is` that are searched for the end of the answer."""


def answers_in(text: str, answer_from: Sequence[str], pattern: re.Pattern[str] | None = None) -> list[str]:
    """The answers in the first place of `answer_from` that has any, in text order. `pattern` is for `pattern`."""
    for place in answer_from:
        candidates = [] if place == "pattern" and pattern is None else FINDERS[place](text, pattern)
        answers = [candidate.strip() for candidate in candidates if candidate.strip()]
        if answers:
            return answers
    return []


def boxed(text: str) -> list[str]:
    """The contents of every closed box that is not inside another box."""
    spans: list[tuple[int, int, int, int]] = []
    opened: list[tuple[int, int] | None] = []
    for match in _PIECE.finditer(text):
        if match["token"]:
            last = match.start("token") + len(match["token"].rstrip(".,;:"))
            spans.append((match.start(), match.end(), match.start("token"), last))
        elif match["box"]:
            opened.append((match.start(), match.end()))
        elif match["brace"] == "{":
            opened.append(None)
        elif match["brace"] == "}" and opened and (box := opened.pop()) is not None:
            spans.append((box[0], match.end(), box[1], match.start()))
    # Slice only the outermost boxes: copying the contents of nested boxes would take quadratic time.
    return [text[first:last] for first, last in _outermost(spans)]


def _outermost(spans: list[tuple[int, int, int, int]]) -> list[tuple[int, int]]:
    """The contents of the boxes that are in no other. A box is (start, end, start of contents, end of contents)."""
    kept: list[tuple[int, int]] = []
    end = -1
    for start, stop, first, last in sorted(spans):
        if start >= end:
            kept.append((first, last))
            end = stop
    return kept


def _after_phrase(text: str) -> list[str]:
    """The texts after `the answer is`, up to the end of the formula or sentence."""
    answers = []
    matches = list(_PHRASE.finditer(text))
    for match, following in zip_longest(matches, matches[1:]):
        end = len(text) if following is None else following.start()
        rest = text[match.end() : min(end, match.end() + LONGEST_PHRASE)].lstrip(" \t:")
        below = rest.lstrip()
        if rest.startswith("\n") and (match[0].rstrip("*")[-1] == ":" or below.startswith(_OPENINGS)):
            rest = below  # the answer is on the next line
        stated = _formula(rest)
        remark = _REMARK.search(stated)
        answers.append(stated[: remark.start()] if remark else stated)
    return answers


def _formula(rest: str) -> str:
    """The formula at the start of the text without its delimiters, else the first sentence."""
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
    "phrase": lambda text, _: _after_phrase(text),
    "label": lambda text, _: _LABEL.findall(text),
    "number": lambda text, _: [number.rstrip(",") for number in _NUMBER.findall(text)],
    "pattern": _pattern,
    "response": lambda text, _: [text],
}
PLACES = tuple(FINDERS)
"""The places of `answer_from`."""
