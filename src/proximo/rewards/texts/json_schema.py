"""The verifier of JSON that must satisfy a schema."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from proximo.config.rewards.text_rules import schema_problem
from proximo.errors import ConfigError
from proximo.rewards.texts.json_reading import BadJSONError, read_json
from proximo_verifiers.code.extraction import fenced_blocks
from proximo_verifiers.verifier import Answer, Grade, ScoreState, Verifier


class JSONSchemaVerifier(Verifier):
    """Scores 1 for JSON that satisfies the schema, else 0.

    The JSON is the last fenced block, or the whole response; `json_reading.read_json` refuses some. The schema
    follows draft 2020-12 unless `$schema` names another. It may refer to its own parts only, and nothing is fetched. As
    in the standard, `format` is not validated.
    """

    def __init__(
        self,
        *,
        json_schema: Mapping[str, Any],
        reads: Literal["last_block", "response"] = "last_block",
        max_bytes: int = 65536,
        max_nesting: int = 32,
    ) -> None:
        """Raises ConfigError for an invalid schema, or if the package jsonschema is missing."""
        self.validator = make_validator(json_schema)
        self.reads = reads
        self.max_bytes = max_bytes
        self.max_nesting = max_nesting

    def grade(self, answer: Answer) -> Grade:
        """The grade, with the component `parsed`: 1 if the JSON could be parsed. Otherwise the answer is at fault."""
        try:
            value = read_json(self._document(answer.text), max_bytes=self.max_bytes, max_nesting=self.max_nesting)
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

    def _document(self, text: str) -> str:
        if self.reads == "response":
            return text
        blocks = [block for block in fenced_blocks(text) if block.closed]
        if not blocks:
            raise BadJSONError("no fenced block")
        return blocks[-1].text


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
