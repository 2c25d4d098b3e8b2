"""The verifier of JSON that must satisfy a schema, with a strict parser that checks sizes before it makes a value."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from proximo.config.rewards.text_rules import schema_problem
from proximo.errors import ConfigError
from proximo_verifiers.code.extraction import fenced_blocks
from proximo_verifiers.verifier import Answer, Grade, ScoreState, Verifier

MAX_BYTES = 65536
MAX_NESTING = 32
MAX_INTEGER_DIGITS = 300
"""Below the largest float (1.8e308), so that comparing an integer with a float cannot fail."""
STRINGS = re.compile(r'"(?:[^"\\]|\\.)*+"?', re.DOTALL)


class JSONSchemaVerifier(Verifier):
    """Scores 1 for JSON that satisfies the schema, else 0.

    The JSON is the last fenced block, or the whole response if it has none; `read_json` refuses some. The schema
    follows draft 2020-12 unless `$schema` names another. It may refer to its own parts only, and nothing is fetched. As
    in the standard, `format` is not validated.
    """

    def __init__(self, *, json_schema: Mapping[str, Any]) -> None:
        """Raises ConfigError for an invalid schema, or if the package jsonschema is missing."""
        self.validator = make_validator(json_schema)

    def grade(self, answer: Answer) -> Grade:
        """The grade, with the component `parsed`: 1 if the JSON could be parsed. Otherwise the answer is at fault."""
        try:
            value = read_json(_document(answer.text))
        except BadJSONError as error:
            return _grade(parsed=False, reason=str(error))
        try:
            problem = next(self.validator.iter_errors(value), None)
        except (ArithmeticError, RecursionError) as error:
            # The answer contains a number or a depth that the validator cannot handle.
            return _grade(parsed=True, reason=f"the schema cannot be checked: {type(error).__name__}")
        if problem is None:
            return Grade(score=1.0, components={"parsed": 1.0})
        return _grade(parsed=True, reason=f"{problem.json_path:.80} fails {problem.validator!r}")

    def timeout_grade(self) -> Grade:
        """The grade of an answer during which the worker was killed."""
        return _grade(parsed=False, reason="checking it took too long")


def _document(text: str) -> str:
    blocks = [block for block in fenced_blocks(text) if block.closed]
    return blocks[-1].text if blocks else text


def make_validator(schema: Mapping[str, Any]) -> Any:
    """A validator of values. Raises ConfigError for an invalid schema, or if jsonschema is missing."""
    if problem := schema_problem(schema):
        raise ConfigError(problem)
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend, validator_for
    from referencing import Registry

    draft = validator_for(schema, default=Draft202012Validator)
    # An empty registry, because the default one would fetch references.
    return extend(draft, {"uniqueItems": _unique_items})(schema, registry=Registry())


def _unique_items(validator: Any, wanted: bool, instance: Any, schema: Mapping[str, Any]) -> Iterator[Exception]:  # noqa: ARG001
    """Checks `uniqueItems` in one pass. jsonschema compares all pairs, which takes over a minute for 64 KiB."""
    from jsonschema import ValidationError

    if wanted and validator.is_type(instance, "array") and len(set(map(_canonical, instance))) < len(instance):
        yield ValidationError("duplicate items")


def _canonical(value: Any) -> str:
    """A text that is the same for values that JSON Schema treats as equal: 1 and 1.0, but not 1 and true."""
    match value:
        case dict():
            return "{" + ",".join(f"{json.dumps(key)}:{_canonical(value[key])}" for key in sorted(value)) + "}"
        case list():
            return "[" + ",".join(map(_canonical, value)) + "]"
        case float() if value.is_integer():
            return str(int(value))
    return json.dumps(value)


def _grade(*, parsed: bool, reason: str) -> Grade:
    return Grade(score=0.0, state=ScoreState.MODEL_FAULT, reason=reason, components={"parsed": float(parsed)})


class BadJSONError(ValueError):
    """The text is not acceptable JSON; the message says why."""


def read_json(text: str) -> Any:
    """The value of a JSON text.

    Raises BadJSONError for invalid JSON, and for more than MAX_BYTES of UTF-8, nesting deeper than MAX_NESTING,
    duplicate keys in an object, NaN and infinities (also as 1e999), and integers of more than MAX_INTEGER_DIGITS
    digits.
    """
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_BYTES:
        raise BadJSONError(f"{size} bytes of JSON, more than {MAX_BYTES}")
    if nesting(text) > MAX_NESTING:
        raise BadJSONError(f"JSON nested more than {MAX_NESTING} deep")
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
