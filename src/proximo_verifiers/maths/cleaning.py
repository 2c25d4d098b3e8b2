"""Normalises an answer: characters and notations of numbers, then what does not belong to its value.

`uniform` writes one character per operator; `clean` also removes dollar signs, spacing, text mode and lead-ins. Every
pattern takes linear time, and texts have at most MAX_CHARACTERS characters.
"""

import re
import unicodedata

BARE_TEXT = r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mathsf|mbox|operatorname)\s*"
_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_CHARACTERS = str.maketrans(
    {
        "\N{MINUS SIGN}": "-",
        "\N{EN DASH}": "-",
        "\N{MULTIPLICATION SIGN}": "*",
        "·": "*",
        "⋅": "*",
        "÷": "/",
        "\N{FRACTION SLASH}": "/",
        "π": "\\pi ",
        "∞": "\\infty ",
        "√": "\\sqrt ",
        "±": "\\pm ",
        "\N{UNION}": "\\cup ",
        "∈": "\\in ",
        "≈": "\\approx ",
        "≤": "\\le ",
        "≥": "\\ge ",
        "∅": "\\emptyset ",
        "\N{DOUBLE-STRUCK CAPITAL R}": "\\mathbb{R}",
        "°": "",
        "€": "",
        "£": "",
        "¥": "",
        "₹": "",
        "\N{PRIME}": "'",
        "\u00a0": " ",
        "\u2009": " ",
        "\u202f": " ",
        "\u3000": " ",
        "\N{HORIZONTAL ELLIPSIS}": "...",
        "~": " ",
    }
    | _FULL_WIDTH
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")
_VULGAR = re.compile("[¼½¾⅐-⅞]")
_OTHER_DIGIT = re.compile(r"[^\x00-\x7f]")
_ENDLESS = re.compile(r"(\d*\.)(\d+) ?(?:\.\.\.|\\[lc]?dots(?![A-Za-z]))", re.ASCII)
LONGEST_PERIOD = 12
"""Largest number of digits of a period that is written twice before dots: 0.142857142857..."""
_NOTATION = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\leq(?:slant)?(?![A-Za-z])|\\leqslant(?![A-Za-z])|<=", r"\\le "),
        (r"\\geq(?:slant)?(?![A-Za-z])|\\geqslant(?![A-Za-z])|>=", r"\\ge "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\langle(?![A-Za-z])", "("),
        (r"\\rangle(?![A-Za-z])", ")"),
        (r"\\mathrm\{\s*([ie])\s*\}", r" \1"),
        (r"(?<=[\d.])\\bar(?![A-Za-z])", r"\\overline"),
        (r"(?<![A-Za-z\\])(ln|log|sin|cos|tan)(?=[\s(\\_^{\d])", r"\\\1 "),
        (r"(?<![A-Za-z])(?:US|AU|CA|NZ|HK|A|C)\\?\$ ?(?=\d)", ""),
        # 5 x 10^3
        (r"(?<=[\d}]) ?[xX] ?(?=10 ?(?:\^|\*\*))", r" \\times "),
    )
)


def uniform(text: str) -> str:
    """The text with one character per operator, and plain digits, exponents and fractions: `7½` is 7\\frac{1}{2}."""
    text = _SUPERSCRIPT.sub(lambda match: f"^{{{match[0].translate(_SUPERSCRIPTS)}}}", text)
    text = _VULGAR.sub(_fraction, text)
    text = _OTHER_DIGIT.sub(lambda match: _digit(match[0]), text.translate(_CHARACTERS))
    for pattern, replacement in _NOTATION:
        text = pattern.sub(replacement, text)
    return _ENDLESS.sub(_with_period, text)


def _with_period(match: re.Match[str]) -> str:
    """Rewrites 0.1666... as 0.1\\overline{6}. Keeps the dots if the digits do not end in a repeated period."""
    digits = match[2]
    for length in range(1, min(LONGEST_PERIOD, len(digits) // 2) + 1):
        period = digits[-length:]
        if digits.endswith(period * 2):
            start = len(digits)
            while digits[:start].endswith(period):
                start -= length
            return f"{match[1]}{digits[:start]}\\overline{{{period}}}"
    return match[0]


def _fraction(match: re.Match[str]) -> str:
    top, _, bottom = unicodedata.normalize("NFKC", match[0]).partition("\N{FRACTION SLASH}")
    return f"\\frac{{{top}}}{{{bottom}}}"


def _digit(character: str) -> str:
    return str(unicodedata.decimal(character, character))


MAX_CHARACTERS = 1000

_STEPS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\\\(?:\[\d*(?:pt|em|ex)\])?", r" \\cr "),
        (r"\\[$]|\$|\\[()\[\]]", ""),
        (r"\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])", ""),
        (r"\\(?:displaystyle|textstyle|limits|boxed|fbox)(?![A-Za-z])", ""),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        # 1{,}000 and 1,\!000 and 1\,000
        (r"(?<=\d)(?:\{,\}|,\\!|\\[,;:! ])\s*(?=\d{3}(?!\d))", ""),
        (r"\\[,;:!> ]|\\q?quad(?![A-Za-z])", " "),
        (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\\degrees?(?![A-Za-z])", ""),
        (r"\\%|(?<=[\d\s])percent(?![A-Za-z])", "%"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\(?:emptyset|varnothing)(?![A-Za-z])", r"\\{\\}"),
        (r"\\(?:cdot|times|ast)(?![A-Za-z])", " * "),
        (r"\\div(?![A-Za-z])", " / "),
        (r"\\(?:doteq|simeq)(?![A-Za-z])", r"\\approx "),
        (r"\*\*(?=\S)", "^"),
        (r"(?:, ?)?" + BARE_TEXT + r"\{\s*(?:,|;)?\s*(?:and|or)\s*\}", ", "),
        (r"(?:, ?)?(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])", ", "),
        (r"(?<![A-Za-z\\])(sqrt|pi|infty)(?![A-Za-z])", r"\\\1 "),
        (r"(?<![A-Za-z\\])(?:infinity|inf|oo)(?![A-Za-z])", r"\\infty "),
        (r"\s+", " "),
    )
)
_MONEY = re.compile(r"(?:\\\$|[€£¥₹]|(?<=[(\[{])\$(?=[^$]*\Z)) ?\d{1,3}(?:,\d{3})+(?![\d,])")
_TEXT = re.compile(BARE_TEXT + r"\{([^{}]*)\}(\s*\^\s*(?:\{\d\}|\d))?")
_SPACES = re.compile(r"\s+")
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE_WORD = rf"({'|'.join(_SCALES)})s?(?![A-Za-z])"
_SCALE = re.compile(r"(?<=[\d\s}])" + _SCALE_WORD)
_SCALE_IN_TEXT = re.compile(BARE_TEXT + r"\{\s*" + _SCALE_WORD)
_RELATION = re.compile(r"[<>]|\\[lg]e(?![A-Za-z])")
_OR = re.compile(rf"(?:, ?)?(?:{BARE_TEXT}\{{\s*or\s*\}}|(?<![A-Za-z\\])or(?![A-Za-z]))")
_QUOTED = re.compile(r"""(?:"(.*)"|'(.*)'|`(.*)`|\u201c(.*)\u201d|\u2018(.*)\u2019)[.,]?""", re.DOTALL)
_BEFORE = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(?:(?:the|my) )?(?:(?:final|correct) )?answer(?: is\b| ?[:=])",
        "(?:thus|therefore|hence|so|indeed|simply|just|then|exactly|precisely|about|approximately|roughly|around"
        r"|equal to|given by|the number|the value|as follows:?)(?= )",
        r"(?:=|\\approx(?![A-Za-z]))",
        r"(?:USD|EUR|GBP|INR|Rs\.?)(?= ?\d)",
        # total = 36, AB = 5, |AB| = 5, \angle ABC = 30
        r"(?:the )?(?:[a-z]{4,} ){0,3}[a-z]{4,} ?[:=](?= ?[-+\\(\[{.\d])",
        r"(?-i:[A-Z]{2,3}) ?=(?= ?[-+\\(.\d])",
        r"(?:\|[a-z]{2}\||m? ?\\angle ?[a-z]{1,3}) ?=",
    )
)
_NEGATIVE = re.compile(r"(?:negative|minus) (?=[\d\\.(])", re.IGNORECASE)
_AFTER = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # 5th, 5^{\text{th}}
        (rf"(?<=\d) ?(?:\^ ?)?(?:\{{ ?)?(?:{BARE_TEXT}\{{)?(?:st|nd|rd|th)(?![A-Za-z])\}}{{0,2}}", ""),
        (rf"(?<=[\d)}}]) ?\\frac ?\{{ ?{BARE_TEXT}\{{[^{{}}]*\}} ?\}} ?\{{ ?{BARE_TEXT}\{{[^{{}}]*\}} ?\}}", ""),
        # 1'000'000 and 1_000_000
        (r"(?<=\d)['_](?=\d{3}(?!\d))", ""),
        (r"^(-?\d+) over (-?\d+)$", r"\\frac{\1}{\2}"),
        (r"^(\d+) to (\d+)$", r"\1:\2"),
        (r"^no solutions?$", r"\\{\\}"),
    )
)


def clean(text: str) -> str:
    """The answer in a normalised form, without wrappers, spacing and words in the text mode of LaTeX."""
    text = _MONEY.sub(lambda match: match[0].replace(",", ""), unquoted(text))  # (€1,000) is no pair
    text = uniform(text)
    if _RELATION.search(text):
        text = _OR.sub(r" \\cup ", text)
    for pattern, replacement in _STEPS:
        text = pattern.sub(replacement, text)
    text = _SCALE_IN_TEXT.sub(r" \1 \\text{", text)
    text = _SCALE.sub(lambda match: f" * 10^{_SCALES[match[1]]}", text)
    for pattern, replacement in _AFTER:
        text = pattern.sub(replacement, text)
    text = _TEXT.sub(lambda match: _bare(match, text), text)
    return _without_lead(_SPACES.sub(" ", text).strip().rstrip(".,;:").lstrip(":").strip())


def unquoted(text: str) -> str:
    """The text without quotation marks, backticks or asterisks that enclose all of it."""
    text = text.strip(" \t\n\r*")  # **5** is bold
    quoted = _QUOTED.fullmatch(text)
    return text if quoted is None else next(group for group in quoted.groups() if group is not None)


def _without_lead(text: str) -> str:
    """The text without a lead-in: `the answer is`, `therefore`, `total =`, a currency."""
    for pattern in _BEFORE:
        while (match := pattern.match(text)) is not None and text[match.end() :].strip():
            text = text[match.end() :].strip()
    return _NEGATIVE.sub("-", text, count=1) if _NEGATIVE.match(text) else text


def _bare(match: re.Match[str], text: str) -> str:
    """Drops words in text mode after a value, which are its unit. Keeps them elsewhere."""
    before = text[: match.start()].rstrip()
    value = before and (before[-1] in "0123456789)}]%" or before.endswith("\\pi"))
    if value and not match[1].strip().isdecimal():
        return " "
    return f" {match[1]} " + (match[2] or "")
