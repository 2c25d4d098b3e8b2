"""A strict parser of untrusted JSON that checks sizes before it makes a value."""

import json
import math
import re
from typing import Any, NoReturn

MAX_INTEGER_DIGITS = 300
"""Below the largest float (1.8e308), so that comparing an integer with a float cannot fail."""
STRINGS = re.compile(r'"(?:[^"\\]|\\.)*+"?', re.DOTALL)


class BadJSONError(ValueError):
    """The text is not acceptable JSON; the message says why."""


def read_json(text: str, *, max_bytes: int, max_nesting: int) -> Any:
    """The value of a JSON text.

    Raises BadJSONError for invalid JSON, and for more than `max_bytes` of UTF-8, nesting deeper than `max_nesting`,
    duplicate keys in an object, NaN and infinities (also as 1e999), and integers of more than MAX_INTEGER_DIGITS
    digits.
    """
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > max_bytes:
        raise BadJSONError(f"{size} bytes of JSON, more than {max_bytes}")
    if nesting(text) > max_nesting:
        raise BadJSONError(f"JSON nested more than {max_nesting} deep")
    try:
        return json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_no_constant,
            parse_float=_finite,
            parse_int=_bounded_integer,
        )
    except json.JSONDecodeError as error:
        raise BadJSONError(f"no JSON: {error.msg} at character {error.pos + 1}") from error


def nesting(text: str) -> int:
    """The largest nesting of brackets outside of strings, closed or not."""
    depth = deepest = 0
    for character in STRINGS.sub("", text):
        if character in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "]}":
            depth -= 1
    return deepest


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise BadJSONError("an object has a key twice")
    return members


def _no_constant(name: str) -> NoReturn:
    raise BadJSONError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise BadJSONError("a number beyond all floats")
    return number


def _bounded_integer(digits: str) -> int:
    if len(digits.lstrip("-")) > MAX_INTEGER_DIGITS:
        raise BadJSONError(f"an integer of more than {MAX_INTEGER_DIGITS} digits")
    return int(digits)
