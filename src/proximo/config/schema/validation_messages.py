"""What pydantic found wrong, in a user's words: which key, where it was written, what came, what is wanted."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from proximo.config.schema.base import Section
from proximo.config.schema.fields import (
    Path,
    annotation_at,
    child_of,
    is_nullable,
    kinds_of,
    section_for,
    sections_of,
)
from proximo.config.schema.overrides import Override
from proximo.config.schema.positioned_yaml import Document
from proximo.config.schema.suggestions import suggested_value, suggestions
from proximo.errors import ConfigError

LONGEST_VALUE = 60
WANTED = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
    "string_pattern_mismatch": "letters, digits, '_', '.' and '-' only",
    "string_type": "text",
    "too_long": "a list of at most {max_length}",
    "too_short": "a list of at least {min_length}",
    "tuple_type": "a list",
}
"""What is wanted, for each kind of error that pydantic can find in a recipe."""


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """One thing that is wrong with a recipe."""

    path: Path
    sentence: str


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where the values of a recipe come from: its file, and the overrides that were put in."""

    document: Document
    overrides: tuple[Override, ...]
    schema: type[Section]
    tree: dict[str, Any]
    """The values, overrides included, as they were given to the schema."""

    def place(self, path: Path, sentence: str) -> str | None:
        """The override or the line that gave the value at `path`.

        What is wrong with the recipe as a whole is blamed on an override only where the sentence names its key.
        """
        named = set(re.findall(r"\w+", sentence))
        for override in reversed(self.overrides):
            if _touches(override, path) and (path or override.path[-1] in named):
                return f"override {override.text}"
        line = self.document.line_of(path)
        return None if line is None else f"line {line}"

    def line(self, path: Path) -> int | None:
        """The line that gave the value at `path`; None where an override did, or nothing."""
        return None if any(_touches(override, path) for override in self.overrides) else self.document.line_of(path)


def _touches(override: Override, path: Path) -> bool:
    return override.path[: len(path)] == path or path[: len(override.path)] == override.path


def explain(errors: Sequence[ErrorDetails], source: Source) -> list[Mistake]:
    """One mistake per key, in the order of the file; those of overrides come last."""
    grouped: dict[Path, list[ErrorDetails]] = {}
    for error in _without_echoes(errors):
        grouped.setdefault(key_path(error, source.tree), []).append(error)
    paths = sorted(grouped, key=lambda path: source.line(path) or sys.maxsize)
    return [Mistake(path=path, sentence=_sentence(path, grouped[path], source)) for path in paths]


def message_of(mistakes: Sequence[Mistake], source: Source) -> str:
    """All of them in one text, each with its place."""
    places = [(source.place(mistake.path, mistake.sentence), mistake.sentence) for mistake in mistakes]
    if len(places) == 1:
        place, sentence = places[0]
        return f"{source.document.origin}{f', {place}' if place else ''}: {sentence}"
    lines = [f"  {f'{place}: ' if place else ''}{sentence}" for place, sentence in places]
    return f"{source.document.origin} has {len(lines)} mistakes:\n" + "\n".join(lines)


def refusal(error: ValidationError, schema: Any, values: dict[str, Any]) -> ConfigError:
    """What is wrong with a section that was made in Python from these values."""
    document = Document(origin=schema.__name__, text="", data=values, root=None)
    source = Source(document=document, overrides=(), schema=schema, tree=values)
    return ConfigError(message_of(explain(error.errors(include_url=False), source), source))


def _without_echoes(errors: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """Without what follows from another error.

    A pipeline hands its `run` to every stage, and what is wrong with it is not said again for each of them. A list
    whose items are wrong is called too short, since pydantic counts the right ones.
    """
    shared = {(error["type"], error["loc"]) for error in errors if error["loc"][:1] == ("run",)}
    no_run = ("missing", ("run",)) in shared
    return [
        error
        for error in errors
        if (error["type"], error["loc"][1:]) not in shared
        and not (no_run and error["type"] == "missing" and error["loc"][1:2] == ("run",))
        and not (error["type"] == "too_short" and len(error["input"]) >= error["ctx"]["min_length"])
    ]


def key_path(error: ErrorDetails, tree: Any) -> Path:
    """The error's place without the names of union members, which pydantic puts between the keys."""
    path: list[str] = []
    node = tree
    *parents, last = error["loc"] or ("",)
    for piece in map(str, parents):
        below = child_of(node, piece)
        if below is not None:
            path.append(piece)
            node = below
    if error["type"] == "missing" or child_of(node, str(last)) is not None or (isinstance(node, dict) and last in node):
        path.append(str(last))
    return tuple(path)


def _sentence(path: Path, errors: Sequence[ErrorDetails], source: Source) -> str:
    error, name = errors[0], ".".join(path)
    match error["type"]:
        case "extra_forbidden":
            return _unknown(path, source)
        case "missing":
            return _missing(path, source)
        case "value_error":
            text = str(error.get("ctx", {}).get("error", error["msg"]))
            return f"{name}: {text}" if name else text
        case "union_tag_not_found":
            return f"{name}.kind is missing; it is one of {_expected_kinds(path, source)}"
        case "union_tag_invalid":
            kind = show(child_of(error["input"], "kind"))
            return f"{name}.kind must be one of {_expected_kinds(path, source)}, got {kind}"
    wanted = list(dict.fromkeys(_wanted(each, path, source) for each in errors))
    if is_nullable(annotation_at(source.schema, source.tree, path)) and error["input"] is not None:
        wanted.append("null")
    return f"{name} must be {' or '.join(wanted)}, got {show(error['input'])}{_meant(errors)}"


def _meant(errors: Sequence[ErrorDetails]) -> str:
    """Which of the words that are wanted the given one may stand for."""
    words = [word for each in errors for word in re.findall(r"'([^']*)'", each.get("ctx", {}).get("expected", ""))]
    meant = suggested_value(errors[0]["input"], words)
    return "" if meant is None else f"; did you mean {meant}?"


def _unknown(path: Path, source: Source) -> str:
    name = ".".join(path)
    around = annotation_at(source.schema, source.tree, path[:-1])
    section = section_for(around, _value_at(source.tree, path[:-1]))
    others = [kind for other in sections_of(around) if path[-1] in other.model_fields for kind in kinds_of(other)]
    if section is not None and others:
        return f"{name} is for kind {' or '.join(others)}, and this is of kind {' or '.join(kinds_of(section))}"
    if found := suggestions(path, source.schema, source.tree):
        return f"{name} is not a known key; did you mean {' or '.join(found)}?"
    known = f"; known here: {', '.join(section.model_fields)}" if section else ""
    return f"{name} is not a known key{known}"


def _missing(path: Path, source: Source) -> str:
    if path[-1].isdecimal():
        return f"{'.'.join(path[:-1])} is a list with too few items"
    around = annotation_at(source.schema, source.tree, path[:-1])
    section = section_for(around, _value_at(source.tree, path[:-1]))
    meaning = section.model_fields[path[-1]].description if section and path[-1] in section.model_fields else None
    return f"{'.'.join(path)} is missing" + (f": {first_sentence(meaning)}" if meaning else "")


def _expected_kinds(path: Path, source: Source) -> str:
    sections = sections_of(annotation_at(source.schema, source.tree, path))
    return ", ".join(kind for section in sections for kind in kinds_of(section))


def _wanted(error: ErrorDetails, path: Path, source: Source) -> str:
    if error["type"] in ("model_type", "model_attributes_type"):
        return _wanted_section(path, source)
    if error["type"] == "string_type" and isinstance(error["input"], bool | int | float):
        return "text (put it in quotes)"
    if phrase := WANTED.get(error["type"]):
        return phrase.format(**error.get("ctx", {}))
    return error["msg"].removeprefix("Input should be ").lower()


def _wanted_section(path: Path, source: Source) -> str:
    sections = sections_of(annotation_at(source.schema, source.tree, path))
    return f"a section with keys such as {', '.join(list(sections[0].model_fields)[:4])}" if sections else "a section"


def _value_at(tree: Any, path: Path) -> Any:
    for piece in path:
        tree = child_of(tree, piece)
    return tree


def first_sentence(text: str) -> str:
    """Up to the first full stop."""
    return " ".join(text.split()).partition(". ")[0].rstrip(".")


def show(value: Any) -> str:
    """A value as a user would have written it, shortened."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case dict():
            return "a section" if value else "an empty section"
        case list():
            return f"a list of {len(value)}"
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."
