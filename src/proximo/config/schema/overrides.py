"""Parses `key.sub=value` arguments and applies them to the values of a recipe, before validation.

A value is a plain YAML 1.2 scalar, or a list, mapping or quoted text in YAML's flow style.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from proximo.config.schema.fields import (
    Path,
    annotation_at,
    child_of,
    has_kinds,
    is_list,
    is_nullable,
    kinds_of,
    section_for,
    sections_of,
)
from proximo.config.schema.positioned_yaml import parse_document, plain_scalar
from proximo.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Override:
    """One parsed argument `key.sub=value`."""

    text: str
    path: tuple[str, ...]
    value: Any


def parse_override(text: str) -> Override:
    """Parse one argument. Raises ConfigError if it is malformed."""
    key, equals, value = text.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        raise ConfigError(f"an override is key.sub=value, for example run.seed=1; got {text!r}")
    if not value.strip():
        raise ConfigError(f"the override {text!r} has no value; {key}=null is none, {key}='\"\"' is empty text")
    return Override(text=text, path=path, value=_parse_value(value.strip(), text))


def _parse_value(value: str, override: str) -> Any:
    if value[0] in "[{\"'":
        return parse_document(value, f"the override {override!r}").data
    return plain_scalar(value)


def apply_overrides(tree: dict[str, Any], overrides: Sequence[Override], schema: Any) -> dict[str, Any]:
    """A copy of `tree` with the overrides applied in order.

    null for a key that does not allow it removes the key, so that its default applies. A new `kind` removes the keys of
    the previous kind.
    """
    for override in overrides:
        tree = _with_value(tree, (), override, partial(annotation_at, schema, tree))
    return tree


def _with_value(node: Any, done: tuple[str, ...], override: Override, annotation: Callable[[Path], Any]) -> Any:
    """A copy of `node`, whose path is `done`, with the override applied."""
    if done == override.path:
        return override.value
    piece = override.path[len(done)]
    if isinstance(node, list) or (node is None and is_list(annotation(done)) and piece.isdecimal()):
        return _with_item(node or [], done, override, annotation)
    if isinstance(node, str) and has_kinds(annotation(done)):
        node = {"kind": node}
    if node is not None and not isinstance(node, dict):
        raise ConfigError(f"override {override.text!r}: {'.'.join(done)} is {node!r}, which has no keys below it")
    child = _with_value(child_of(node, piece), (*done, piece), override, annotation)
    changed = {**(node or {}), piece: child}
    if (*done, piece) != override.path:
        return changed
    if child is None and _refuses_null(annotation(override.path)):
        return {key: value for key, value in changed.items() if key != piece}
    return _without_other_kind(changed, annotation(done)) if piece == "kind" else changed


def _with_item(
    items: list[Any], done: tuple[str, ...], override: Override, annotation: Callable[[Path], Any]
) -> list[Any]:
    piece = override.path[len(done)]
    if not piece.isdecimal() or int(piece) > len(items):
        raise ConfigError(
            f"override {override.text!r}: {'.'.join(done)} is a list of {len(items)}; its items go by number from 0, "
            f"and {len(items)} adds one"
        )
    index = int(piece)
    item = _with_value(child_of(items, piece), (*done, piece), override, annotation)
    return [*items[:index], item, *items[index + 1 :]]


def _refuses_null(annotation: Any) -> bool:
    return annotation is not None and not is_nullable(annotation)


def _without_other_kind(node: dict[str, Any], annotation: Any) -> dict[str, Any]:
    """`node` without keys that belong only to other sections of the union. An unknown kind keeps all keys."""
    section = section_for(annotation, node)
    if section is None or not kinds_of(section):
        return node
    foreign = {key for other in sections_of(annotation) for key in other.model_fields} - set(section.model_fields)
    return {key: value for key, value in node.items() if key not in foreign}
