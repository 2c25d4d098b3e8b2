"""Normalises characters and everyday notations of numbers. Every pattern takes linear time."""

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
_STEPS = tuple(
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
    for pattern, replacement in _STEPS:
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
