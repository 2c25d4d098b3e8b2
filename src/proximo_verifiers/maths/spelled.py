"""Numbers and sets written in words: `twenty-one`, `two thirds`, `no solution`."""

import re

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
