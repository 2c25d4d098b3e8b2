"""Checks regular expressions and JSON schemas. Imports no pydantic, because verifier processes use it too."""

from collections.abc import Iterator, Mapping
from typing import Any

REFERENCES = ("$ref", "$dynamicRef")


def pattern_problem(pattern: str) -> str | None:
    """Why `pattern` is not a regular expression of the `regex` package; None if it is."""
    import regex

    try:
        regex.compile(pattern)
    except regex.error as error:
        place = "" if error.pos is None else f" at character {error.pos + 1}"
        return f"{pattern!r} is no regular expression: {error.msg}{place}"
    return None


def schema_problem(schema: Mapping[str, Any]) -> str | None:
    """Why a JSON schema cannot be used; None if it can. Fetches nothing."""
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
        return f"no JSON schema: at {error.json_path}, {error.message:.200}"
    if problem := _reference_problem(schema):
        return problem
    made = validator(schema, registry=Registry())
    try:
        for value in (None, 0, "", [], {}):
            made.is_valid(value)
    except RecursionError:
        return "the schema refers to itself without an end: what refers to the whole must stand below a part of it"
    return None


def _reference_problem(schema: Mapping[str, Any]) -> str | None:
    from referencing import Registry, Resource
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    resolver = Registry().resolver_with_root(Resource.from_contents(schema, default_specification=DRAFT202012))
    for reference in references(schema):
        if not reference.startswith("#"):
            return (
                f"the schema refers to {reference!r}; nothing is fetched, so a reference must begin with '#' and name "
                "a part of the schema: put what it means under '$defs'"
            )
        try:
            resolver.lookup(reference)
        except Unresolvable:
            return f"the schema refers to {reference!r}, which is no part of it"
    return None


def references(schema: Any) -> Iterator[str]:
    """All references (`$ref`) in a schema, at any depth."""
    if isinstance(schema, Mapping):
        for name, value in schema.items():
            if name in REFERENCES and isinstance(value, str):
                yield value
            else:
                yield from references(value)
    elif isinstance(schema, list | tuple):
        for value in schema:
            yield from references(value)
