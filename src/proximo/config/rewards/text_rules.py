"""Checks regular expressions and JSON schemas. Imports no pydantic, since verifiers in workers use it as well."""

from collections.abc import Iterator, Mapping
from typing import Any

REFERENCES = ("$ref", "$dynamicRef")


def pattern_problem(pattern: str) -> str | None:
    """The reason why `pattern` is not a regular expression of the `regex` package, or None."""
    import regex

    try:
        regex.compile(pattern)
    except regex.error as error:
        position = "" if error.pos is None else f" at character {error.pos + 1}"
        return f"{pattern!r} is not a regular expression: {error.msg}{position}"
    return None


def schema_problem(schema: Mapping[str, Any]) -> str | None:
    """The reason why this JSON schema cannot be used, or None. Fetches nothing."""
    try:
        from jsonschema import Draft202012Validator, SchemaError
        from jsonschema.validators import validator_for
        from referencing import Registry
    except ImportError:
        return "rewards of kind json_schema need the package jsonschema: pip install 'proximo[json-schema]'"
    validator = validator_for(schema, default=Draft202012Validator)
    try:
        validator.check_schema(schema)
    except SchemaError as error:
        return f"not a JSON schema: at {error.json_path}, {error.message:.200}"
    if problem := _reference_problem(schema):
        return problem
    probe = validator(schema, registry=Registry())
    try:
        for value in (None, 0, "", [], {}):
            probe.is_valid(value)
    except RecursionError:
        return "the schema refers to itself without end: a reference to all of it must stand in a part of it"
    return None


def _reference_problem(schema: Mapping[str, Any]) -> str | None:
    from referencing import Registry, Resource
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    resolver = Registry().resolver_with_root(Resource.from_contents(schema, default_specification=DRAFT202012))
    for reference in references(schema):
        if not reference.startswith("#"):
            return (
                f"the schema refers to {reference!r}, but nothing is fetched: a reference must begin with '#' and name "
                "a part of the schema; put the definition under '$defs'"
            )
        try:
            resolver.lookup(reference)
        except Unresolvable:
            return f"the schema refers to {reference!r}, which is not a part of it"
    return None


def references(schema: Any) -> Iterator[str]:
    """Every `$ref` and `$dynamicRef` in a schema, at any depth."""
    if isinstance(schema, Mapping):
        for name, value in schema.items():
            if name in REFERENCES and isinstance(value, str):
                yield value
            else:
                yield from references(value)
    elif isinstance(schema, list | tuple):
        for value in schema:
            yield from references(value)
