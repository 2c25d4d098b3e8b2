"""Words in answers: units after a value, answers such as `east`, letters of multiple choices."""

import re

from proximo_verifiers.maths.notation import BARE_TEXT

_WHOLE_TEXT = re.compile(BARE_TEXT + r"\{([^{}]*)\}")
_WORDS = re.compile(r"[A-Za-z][A-Za-z '-]*")
_TAIL = re.compile(r"[A-Za-z /.*'-]*")
_LETTER = re.compile(r"(?<![\\A-Za-z])[A-Za-z]")
_UNIT_POWER = re.compile(r"(?<=[A-Za-z]) ?\^ ?(?:\{[23]\}|[23])$")
SHORT_UNITS = "m g s h l L V N J W A K C F a"
JOINED_UNITS = "cm mm km kg mg ml mL kWh kW Hz kHz mph km/h m/s in ft lb lbs oz yd min sec hr hrs"
FUNCTIONS = "sin cos tan cot sec log ln exp arcsin arccos arctan max min mod lcm gcd sqrt pi"
SHORT_WORDS = "yes no true false odd even none both neither"
_CHOICE_WORD = re.compile(r"^(?:option|choice|answer)(?: ?: ?| )(?=\W*[A-Ja-j]\b)", re.IGNORECASE)
_OTHER_CHOICE = re.compile(r"(?<![A-Za-z(])[A-Ja-j]\)|(?<![A-Za-z])\([A-Ja-j]\)")
_ONLY_CHOICES = re.compile(r"[\s,;/|&.:]*(?:(?:and|or)\s+)?[A-J](?![A-Za-z])[\s,;/|&.:A-J]*")
_SHORT_UNITS, _JOINED_UNITS = frozenset(SHORT_UNITS.split()), frozenset(JOINED_UNITS.split())
_FUNCTIONS, _SHORT_WORDS = frozenset(FUNCTIONS.split()), frozenset(SHORT_WORDS.split())


def without_unit(text: str) -> str | None:
    """A cleaned text without the unit after its value; None if it has no unit."""
    text = _UNIT_POWER.sub("", text)
    end = max((text.rfind(mark) + len(mark) for mark in (*"0123456789)}%", "\\pi") if mark in text), default=0)
    tail = text[end:]
    if not end or not tail.strip() or not _TAIL.fullmatch(tail):
        return None
    words = re.split(r"[ /.*'-]+", tail.strip())
    if tail[0] not in " -/":
        return text[:end] if tail.strip() in _JOINED_UNITS else None
    # After a formula with letters, one more letter is a factor: the h in \\pi r^2 h is not an hour.
    short = frozenset() if _LETTER.search(text[:end]) else _SHORT_UNITS
    known = all((len(word) > 1 and word not in _FUNCTIONS) or word in short or not word for word in words)
    return text[:end] if known else None


def words_of(text: str) -> str | None:
    """An answer that consists of words, such as `east` or `(C)`, in lower case; None for anything else."""
    bare = text.strip().strip("$").strip()
    whole = _WHOLE_TEXT.fullmatch(bare)
    inner = (whole[1] if whole else bare).strip().rstrip(".").strip()
    if len(inner) > 2 and inner[0] == "(" and inner[-1] == ")":
        inner = inner[1:-1].strip()
        choice = len(inner) == 1 and inner.isascii() and inner.isalpha()
        return inner.lower() if choice or (whole and _WORDS.fullmatch(inner)) else None
    if not _WORDS.fullmatch(inner):
        return None
    lowered = " ".join(inner.lower().split())
    long = any(len(word) > 3 for word in lowered.split())
    return lowered if whole or long or lowered in _SHORT_WORDS else None


def chosen_letter(text: str) -> str | None:
    """The letter of a multiple choice in lower case: of `C`, `(C)`, `C.`, `(C) because`, `\\text{C}`, `Option C`.

    Empty if another choice follows, as in `C) D) A)` or `C. D`. None if the text is not a choice.
    """
    bare = _WHOLE_TEXT.sub(lambda match: match[1], text.strip().strip("$").strip())
    bare = _CHOICE_WORD.sub("", bare.strip())
    match = re.match(r"\(?([A-Za-z])(?:\)|[.:](?=\s|$)|$)", bare)
    if match is None:
        return None
    rest = bare[match.end() :]
    return "" if _OTHER_CHOICE.search(rest) or _ONLY_CHOICES.fullmatch(rest) else match[1].lower()
