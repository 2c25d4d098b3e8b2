"""Resolves a plain YAML scalar to null, a boolean, a number or text.

The rules are the core schema of YAML 1.2 (section 10.3.2): `1e-5` is a number, `no`, `on` and `12:30` are text,
`0o17` is octal and `017` is seventeen.
"""

import re

NULL = re.compile(r"null|Null|NULL|~|")
BOOLEAN = re.compile(r"true|True|TRUE|false|False|FALSE")
# At most 400 digits, because Python refuses to parse integers with thousands of digits.
DECIMAL = re.compile(r"[-+]?[0-9]{1,400}")
OCTAL = re.compile(r"0o[0-7]{1,400}")
HEXADECIMAL = re.compile(r"0x[0-9a-fA-F]{1,400}")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
INFINITY = re.compile(r"([-+]?)(\.inf|\.Inf|\.INF)")
NOT_A_NUMBER = re.compile(r"\.nan|\.NaN|\.NAN")

Scalar = bool | int | float | str | None


def plain_scalar(text: str) -> Scalar:
    """The value of an unquoted scalar."""
    if NULL.fullmatch(text):
        return None
    if BOOLEAN.fullmatch(text):
        return text.lower() == "true"
    if DECIMAL.fullmatch(text):
        return int(text)
    if OCTAL.fullmatch(text) or HEXADECIMAL.fullmatch(text):
        return int(text, base=0)
    return _float_or_text(text)


def _float_or_text(text: str) -> float | str:
    if FLOAT.fullmatch(text):
        return float(text)
    if infinity := INFINITY.fullmatch(text):
        return float(infinity[1] + "inf")
    return float("nan") if NOT_A_NUMBER.fullmatch(text) else text
