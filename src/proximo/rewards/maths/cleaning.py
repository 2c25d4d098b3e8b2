"""What does not belong to an answer's value is taken off: dollar signs, spacing, text mode. Not its words: words.py.

Every pattern here is linear in the text, and texts are at most MAX_CHARACTERS long.
"""

import re

MAX_CHARACTERS = 1000

BARE_TEXT = r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mathsf|mbox|operatorname)\s*"
_CHARACTERS = str.maketrans(
    {
        "\N{MINUS SIGN}": "-",
        "\N{EN DASH}": "-",
        "\N{MULTIPLICATION SIGN}": "*",
        "·": "*",
        "⋅": "*",
        "÷": "/",
        "π": "\\pi ",
        "∞": "\\infty ",
        "√": "\\sqrt ",
        "±": "\\pm ",
        "\N{UNION}": "\\cup ",
        "∈": "\\in ",
        "≈": "\\approx ",
        "²": "^2",
        "³": "^3",
        "°": "",
        "€": "",
        "£": "",
        "¥": "",
        "\N{PRIME}": "'",
        "\u00a0": " ",
        "\u2009": " ",
        "\u202f": " ",
        "~": " ",
    }
)
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
_TEXT = re.compile(BARE_TEXT + r"\{([^{}]*)\}(\s*\^\s*(?:\{\d\}|\d))?")
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE = re.compile(r"(?<=[\d\s}])(hundred|thousand|million|billion|trillion)s?(?![A-Za-z])")


def clean(text: str) -> str:
    """The answer without wrappers, spacing and words in LaTeX's text mode, in one way of writing."""
    text = text.strip(" \t\n\r*").translate(_CHARACTERS)  # **5** is bold
    for pattern, replacement in _STEPS:
        text = pattern.sub(replacement, text)
    text = _SCALE.sub(lambda found: f" * 10^{_SCALES[found[1]]}", text)
    text = _TEXT.sub(lambda found: _bare(found, text), text)
    return text.strip().rstrip(".,;:").lstrip(":").strip()


def _bare(found: re.Match[str], text: str) -> str:
    """Words in text mode after a value are its unit; elsewhere they stand for themselves."""
    before = text[: found.start()].rstrip()
    if before and before[-1] in "0123456789)}]%" and not found[1].strip().isdecimal():
        return " "
    return f" {found[1]} " + (found[2] or "")
