"""Turns pydantic errors into messages with the key, its line, the given and the expected value, and what was meant."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, reduce
from itertools import takewhile
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from proximo.config.schema.fields import (
    Path,
    annotation_at,
    child_of,
    is_nullable,
    key_paths,
    kinds_of,
    section_for,
    sections_of,
)
from proximo.config.schema.overrides import Override
from proximo.config.schema.positioned_yaml import Document
from proximo.errors import ConfigError

MAX_VALUE_CHARACTERS = 60
MAX_SUGGESTIONS = 3
CODE = r".+:[A-Za-z_]\w*"  # the pattern of a key that names a class or function
EXPECTED = {
    "bool": "be true or false",
    "dict": "be a mapping",
    "int": "be a whole number",
    "int_from_float": "be a whole number",
    "int_parsing_size": "be a smaller whole number",
    "model": "be a section",
    "model_attributes": "be a section",
    "string": "be text (put it in quotes)",
    "string_pattern_mismatch": "have the form {pattern}",
    "too_short": "be a list of at least {min_length}",
    "tuple": "be a list",
}
"""Type of a pydantic error, without `_type` and `_parsing` at its end -> what the value must be, where pydantic's own
words would not do."""


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """One mistake in a recipe."""

    path: Path
    sentence: str


@dataclass(frozen=True, kw_only=True)
class Source:
    """The file and the overrides that the values of a recipe come from."""

    document: Document
    overrides: tuple[Override, ...]
    schema: type[BaseModel]
    tree: dict[str, Any]
    """The values with overrides applied, before validation."""

    def location(self, path: Path, sentence: str) -> str | None:
        """The override or the line that gave the value at `path`, as text.

        A mistake of the whole recipe (empty path) is attributed to an override only if the sentence names its key.
        """
        named = set(re.findall(r"\w+", sentence))
        for override in reversed(self.overrides):
            if _touches(override, path) and (path or override.path[-1] in named):
                return f"override {override.text}"
        made = [override for override in self.overrides if override.path[: len(path) - 1] == path[:-1]]
        if made and len(path) > 1 and reduce(child_of, path[:-1], self.document.data) is None:
            return f"override {made[-1].text}"
        line = self.document.line_of(path)
        return None if line is None else f"line {line}"

    def line(self, path: Path) -> int | None:
        """The line that gave the value at `path`; None if an override gave it, or nothing did."""
        return None if any(_touches(override, path) for override in self.overrides) else self.document.line_of(path)


def _touches(override: Override, path: Path) -> bool:
    return override.path[: len(path)] == path or path[: len(override.path)] == override.path


def explain(errors: Sequence[ErrorDetails], source: Source) -> list[Mistake]:
    """One mistake per key, in the order of the file. Mistakes of overrides come last."""
    grouped: dict[Path, list[ErrorDetails]] = {}
    for error in _without_repeated_errors(errors):
        grouped.setdefault(key_path(error, source.tree), []).append(error)
    paths = sorted(grouped, key=lambda path: source.line(path) or sys.maxsize)
    return [Mistake(path=path, sentence=_sentence(path, grouped[path], source)) for path in paths]


def message_of(mistakes: Sequence[Mistake], source: Source) -> str:
    """One text with all mistakes and their locations."""
    located = [(source.location(mistake.path, mistake.sentence), mistake.sentence) for mistake in mistakes]
    if len(located) == 1:
        location, sentence = located[0]
        return f"{source.document.origin}{f', {location}' if location else ''}: {sentence}"
    lines = [f"  {f'{location}: ' if location else ''}{sentence}" for location, sentence in located]
    return f"{source.document.origin} has {len(lines)} mistakes:\n" + "\n".join(lines)


def construction_error(error: ValidationError, schema: Any, values: dict[str, Any]) -> ConfigError:
    """The error for a section that was constructed in Python with invalid values."""
    document = Document(origin=schema.__name__, text="", data=values, root=None)
    source = Source(document=document, overrides=(), schema=schema, tree=values)
    return ConfigError(message_of(explain(error.errors(include_url=False), source), source))


def _without_repeated_errors(errors: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """The errors without those that follow from another one.

    A pipeline passes its `run` to every stage, so each error in it would be repeated. pydantic also calls a list with
    invalid items too short, since it counts only valid ones, and a default that depends on an invalid key missing.
    """
    shared = {(error["type"], error["loc"]) for error in errors if error["loc"][:1] == ("run",)}
    return [
        error
        for error in errors
        if (error["type"], error["loc"][1:]) not in shared
        and not (("missing", ("run",)) in shared and error["type"] == "missing" and error["loc"][1:2] == ("run",))
        and error["type"] != "default_factory_not_called"
        and not (error["type"] == "too_short" and len(error["input"]) >= error["ctx"]["min_length"])
    ]


def key_path(error: ErrorDetails, tree: Any) -> Path:
    """The error's key path. pydantic's location also has the names of union members, which are removed."""
    path: list[str] = []
    node = tree
    *parents, last = error["loc"] or ("",)
    for piece in map(str, parents):
        child = child_of(node, piece)
        if child is not None:
            path.append(piece)
            node = child
    if error["type"] == "missing" or child_of(node, str(last)) is not None or (isinstance(node, dict) and last in node):
        path.append(str(last))
    return tuple(path)


def _sentence(path: Path, errors: Sequence[ErrorDetails], source: Source) -> str:
    error, name = errors[0], ".".join(path)
    annotation = annotation_at(source.schema, source.tree, path)
    null = ["null"] if is_nullable(annotation) and error["input"] is not None else []
    match error["type"]:
        case "extra_forbidden":
            return _unknown(path, source)
        case "missing":
            return _missing(path, source)
        case "value_error":
            text = str(error.get("ctx", {}).get("error", error["msg"]))
            return f"{name}: {text}" if name else text
        case "union_tag_not_found" | "union_tag_invalid":
            kinds = [kind for section in sections_of(annotation) for kind in kinds_of(section)]
            wanted = ", or ".join([", ".join(kinds), *null])
            return f"{name}.kind must be one of {wanted}, got {show(child_of(error['input'], 'kind'))}"
    expected = " or ".join([*dict.fromkeys(map(_expected, errors)), *null]).replace(" or be ", " or ")
    return f"{name} must {expected}, got {show(error['input'])}"


def _expected(error: ErrorDetails) -> str:
    phrase = EXPECTED.get(error["type"].removesuffix("_type").removesuffix("_parsing"))
    text = phrase.format(**error.get("ctx", {})) if phrase else re.sub(r"^\w+ should ", "", error["msg"])
    return text.replace(CODE, "file.py:Name or package.module:Name")


def _unknown(path: Path, source: Source) -> str:
    name, parent = ".".join(path), annotation_at(source.schema, source.tree, path[:-1])
    section = section_for(parent, reduce(child_of, path[:-1], source.tree))
    others = [kind for other in sections_of(parent) if path[-1] in other.model_fields for kind in kinds_of(other)]
    if section is not None and others:
        return f"{name} is for kind {' or '.join(others)}, and this is of kind {' or '.join(kinds_of(section))}"
    if candidates := suggestions(path, source.schema, source.tree):
        return f"{name} is not a known key; did you mean {' or '.join(candidates)}?"
    return f"{name} is not a known key" + (f"; known here: {', '.join(section.model_fields)}" if section else "")


def suggestions(typed: Path, schema: Any, tree: Any) -> tuple[str, ...]:
    """Full paths of the known keys that were probably meant, at most MAX_SUGGESTIONS and without `typed` itself.

    A similar name in the same section comes first, then a similar one anywhere. The name is also compared with the last
    two parts of a path: `kl_coef` with `kl.coefficient`.
    """
    name = typed[-1].lower().replace("-", "_")
    shared = {path: _num_shared(typed, path) for path in _all_paths(schema)}
    others = [path for path in ((*typed[:num], *path[num:]) for path, num in shared.items()) if path != typed]
    beside = [path[-1] for path in others if path[:-1] == typed[:-1]]
    longer = [other for other in beside if len(name) > 2 and other.startswith(name)]
    near: list[list[Path]] = [
        [(*typed[:-1], other)] for other in (*get_close_matches(name, beside, cutoff=0.7), *longer)
    ]
    ends = {end for path in others for end in (path[-1], "_".join(path[-2:]))}
    for end in get_close_matches(name, ends, cutoff=0.75):
        near.append([path for path in others if end in (path[-1], "_".join(path[-2:]))])
    for paths in near:
        ranks = {path: (_num_shared(typed, path), -len(path)) for path in paths if annotation_at(schema, tree, path)}
        if best := [".".join(path) for path, rank in ranks.items() if rank == max(ranks.values())]:
            return tuple(best[:MAX_SUGGESTIONS])
    return ()


@cache
def _all_paths(schema: Any) -> tuple[Path, ...]:
    return tuple(path for path, _ in key_paths(schema))


def _num_shared(typed: Path, path: Path) -> int:
    """Number of parts that two paths have in common at their start; any two list indices count as equal."""
    equal = (one == other or (one.isdecimal() and other.isdecimal()) for one, other in zip(typed, path, strict=False))
    return sum(takewhile(bool, equal))


def _missing(path: Path, source: Source) -> str:
    if path[-1].isdecimal():
        return f"{'.'.join(path[:-1])} is a list with too few items"
    parent = annotation_at(source.schema, source.tree, path[:-1])
    section = section_for(parent, reduce(child_of, path[:-1], source.tree))
    meaning = section.model_fields[path[-1]].description if section and path[-1] in section.model_fields else None
    return f"{'.'.join(path)} is missing" + (f": {first_sentence(meaning)}" if meaning else "")


def first_sentence(text: str) -> str:
    """The text up to the first full stop, on one line."""
    return " ".join(text.split()).partition(". ")[0].rstrip(".")


def show(value: Any) -> str:
    """A value as it is written in a recipe, shortened."""
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
    return text if len(text) <= MAX_VALUE_CHARACTERS else f"{text[:MAX_VALUE_CHARACTERS]}..."
