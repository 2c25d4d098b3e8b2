"""Words in answers: units after a value, letters of choices, numbers and sets such as `two thirds` or `no solution`."""

import re

from proximo_verifiers.maths.cleaning import BARE_TEXT

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
ONES = "one two three four five six seven eight nine"
TEENS = "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
PARTS = "third fourth fifth sixth seventh eighth ninth tenth"
_VALUES = (
    {"zero": 0}
    | {word: value for value, word in enumerate(f"{ONES} {TEENS}".split(), start=1)}
    | {word: 10 * value for value, word in enumerate(TENS.split(), start=2)}
)
_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6}
_DENOMINATORS = {"half": 2, "halves": 2, "quarter": 4} | {
    word: value for value, word in enumerate(PARTS.split(), start=3)
}
_ONE_OF = ONES.replace(" ", "|")
_BELOW_100 = rf"(?:(?:{TENS.replace(' ', '|')})(?:[ -](?:{_ONE_OF}))?|{TEENS.replace(' ', '|')}|{_ONE_OF})"
_BELOW_1000 = rf"(?:(?:{_ONE_OF}) hundred(?: (?:and )?{_BELOW_100})?|{_BELOW_100})"
_NUMBER = rf"(?:zero|{_BELOW_1000} (?:million|thousand)(?:,? (?:and )?{_BELOW_1000})?|{_BELOW_1000})"
_SPELLED = re.compile(rf"(?<![A-Za-z\\-])({_NUMBER})(?:[ -]({'|'.join(_DENOMINATORS)})s?)?(?![A-Za-z])", re.IGNORECASE)
_HALF = re.compile(r"(?<=\d) and a half(?![A-Za-z])|^\s*(?:a )?half\s*$", re.IGNORECASE)
_MIXED = re.compile(r"(?<![\d.,/])(\d+) and (?:(\d+)/(\d+)|\\[dt]?frac\{(\d+)\}\{(\d+)\})")
_REMARK = re.compile(r"(?<=[\d)}%]) \([A-Za-z ,.'-]*[A-Za-z]{3}[A-Za-z ,.'-]*\)[\s.]*$")
_SETS = tuple(
    (re.compile(rf"\s*(?:\\text\{{)?\s*(?:{words})\s*\}}?[\s.]*", re.IGNORECASE), value)
    for words, value in (
        ("(?:there (?:is|are) )?no solutions?|(?:the )?empty set", r"\{\}"),
        (r"all real(?:s| numbers)|(?:the )?real numbers|\\mathbb\s*\{?R\}?", r"(-\infty, \infty)"),
    )
)


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


def in_figures(text: str) -> str:
    """The text with number words as digits and named sets as symbols, without a remark such as in `12 (twelve)`."""
    for pattern, value in _SETS:
        if pattern.fullmatch(text):
            return value
    return _SPELLED.sub(_figures, _REMARK.sub("", text))


def as_mixed_number(text: str) -> str:
    """The text with `7 and 1/2` rewritten as the mixed number `7 1/2`."""
    text = _HALF.sub(lambda match: " and 1/2" if "and" in match[0] else "1/2", text)
    return _MIXED.sub(_mixed, text)


def _figures(match: re.Match[str]) -> str:
    number = _value(match[1].lower())
    return f"{number}" if match[2] is None else f"\\frac{{{number}}}{{{_DENOMINATORS[match[2].lower()]}}}"


def _value(words: str) -> int:
    total = current = 0
    for word in re.findall(r"[a-z]+", words):
        if word in ("thousand", "million"):
            total, current = total + current * _SCALES[word], 0
        elif word == "hundred":
            current *= 100
        else:
            current += _VALUES.get(word, 0)
    return total + current


def _mixed(match: re.Match[str]) -> str:
    top, bottom = match[2] or match[4], match[3] or match[5]
    return f"{match[1]} {top}/{bottom}" if int(top) < int(bottom) else match[0]
