"""Walks the schemas: which keys a recipe may have, and what may stand at each. Not the reading of a recipe.

A path is a tuple of keys; an item of a list goes by its number, as text.
"""

from collections.abc import Iterator, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from proximo.config.schema.base import Section

Path = tuple[str, ...]


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """What a union allows, flat; a type that is no union is its only alternative."""
    if get_origin(annotation) is Annotated:
        return alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return tuple(part for member in get_args(annotation) for part in alternatives(member))
    return (annotation,)


def is_nullable(annotation: Any) -> bool:
    """Whether null may stand here."""
    return any(kind in (NoneType, Any) for kind in alternatives(annotation))


def is_list(annotation: Any) -> bool:
    """Whether a list may stand here."""
    return any(get_origin(kind) is tuple for kind in alternatives(annotation))


def item_annotation(annotation: Any) -> Any:
    """The type of the items of the list that may stand here; Any where there is no such list."""
    lists = [get_args(kind) for kind in alternatives(annotation) if get_origin(kind) is tuple]
    return lists[0][0] if lists else Any


def sections_of(annotation: Any) -> tuple[type[Section], ...]:
    """The sections that may stand here."""
    return tuple(kind for kind in alternatives(annotation) if isinstance(kind, type) and issubclass(kind, Section))


def section_for(annotation: Any, value: Any) -> type[Section] | None:
    """The section that `value` is meant to be: where several may stand, the one of its `kind`."""
    sections = sections_of(annotation)
    if len(sections) < 2:
        return sections[0] if sections else None
    kind = value.get("kind") if isinstance(value, dict) else None
    return next((section for section in sections if kind in kinds_of(section)), None)


def kinds_of(section: type[Section]) -> tuple[str, ...]:
    """The values of `kind` by which a section of a union is known."""
    return get_args(section.model_fields["kind"].annotation) if "kind" in section.model_fields else ()


def annotation_at(root: Any, tree: Any, path: Sequence[str]) -> Any:
    """The type that the schema `root` wants at `path`, where `tree` tells which section of a union is meant.

    None where the schema has no such key; Any inside free mappings.
    """
    annotation, node = root, tree
    for piece in path:
        annotation = _annotation_below(annotation, node, piece)
        node = child_of(node, piece)
    return annotation


def child_of(node: Any, piece: str) -> Any:
    """The value below `node` at a key or an index; None where there is none."""
    if isinstance(node, dict):
        return node.get(piece)
    if isinstance(node, list) and piece.isdecimal() and int(piece) < len(node):
        return node[int(piece)]
    return None


def _annotation_below(annotation: Any, node: Any, piece: str) -> Any:
    if piece.isdecimal() and is_list(annotation):
        return item_annotation(annotation)
    if section := section_for(annotation, node):
        return section.model_fields[piece].annotation if piece in section.model_fields else None
    free = any(kind is Any or get_origin(kind) is dict for kind in alternatives(annotation))
    return Any if free else None


def key_paths(annotation: Any, prefix: Path = ()) -> Iterator[tuple[Path, type[Section]]]:
    """Every key below a type, in the order of the schema, with the section that declares it. Lists count as item 0."""
    for section in sections_of(annotation):
        for name, field in section.model_fields.items():
            yield (*prefix, name), section
            yield from key_paths(field.annotation, (*prefix, name))
    if is_list(annotation):
        yield from key_paths(item_annotation(annotation), (*prefix, "0"))
