"""Walks the schemas: the keys that a recipe may have, and the type of each.

A path is a tuple of keys. A list item has its index as key, as text.
"""

from collections.abc import Iterator, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from proximo.config.schema.own_sections import is_own_kind, open_base, own_section

Path = tuple[str, ...]


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, flattened; a type that is not a union is its only member."""
    if get_origin(annotation) is Annotated:
        return alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return tuple(part for member in get_args(annotation) for part in alternatives(member))
    return (annotation,)


def is_nullable(annotation: Any) -> bool:
    """Whether the type allows null."""
    return any(kind in (NoneType, Any) for kind in alternatives(annotation))


def is_list(annotation: Any) -> bool:
    """Whether the type allows a list."""
    return any(get_origin(kind) is tuple for kind in alternatives(annotation))


def item_annotation(annotation: Any) -> Any:
    """The item type of a list type; Any if the type allows no list."""
    lists = [get_args(kind) for kind in alternatives(annotation) if get_origin(kind) is tuple]
    return lists[0][0] if lists else Any


def sections_of(annotation: Any) -> tuple[type[BaseModel], ...]:
    """The section classes that the type allows."""
    return tuple(kind for kind in alternatives(annotation) if isinstance(kind, type) and issubclass(kind, BaseModel))


def section_for(annotation: Any, value: Any) -> type[BaseModel] | None:
    """The section class for `value`. If the type allows several, its `kind` decides; None if no class fits.

    Where `kind` may be left out, the first class is the default. Raises ConfigError for a `kind` that is the import
    path of no fitting class.
    """
    sections = sections_of(annotation)
    if len(sections) < 2:
        return sections[0] if sections else None
    kind = value.get("kind") if isinstance(value, dict) else value
    if kind is None and not sections[0].model_fields["kind"].is_required():
        return sections[0]
    if is_own_kind(kind) and (base := open_base(sections[0])) is not None:
        return own_section(kind, base)
    return next((section for section in sections if kind in kinds_of(section)), None)


def has_kinds(annotation: Any) -> bool:
    """Whether the type is a union of sections, or also null, of which `kind` selects one."""
    sections = sections_of(annotation)
    others = [each for each in alternatives(annotation) if each not in (*sections, NoneType)]
    return len(sections) > 1 and not others and all(kinds_of(section) for section in sections)


def kinds_of(section: type[BaseModel]) -> tuple[str, ...]:
    """The values of `kind` that select a section in a union; empty for a section without kinds."""
    return get_args(section.model_fields["kind"].annotation) if "kind" in section.model_fields else ()


def annotation_at(root: Any, tree: Any, path: Sequence[str]) -> Any:
    """The type of the key at `path` in the schema `root`. The values in `tree` select the sections of unions.

    None if the schema has no such key; Any inside free-form mappings.
    """
    annotation, node = root, tree
    for piece in path:
        annotation = _annotation_below(annotation, node, piece)
        node = child_of(node, piece)
    return annotation


def child_of(node: Any, piece: str) -> Any:
    """The value of `node` at a key or an index; None if there is none."""
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
    free_form = any(kind is Any or get_origin(kind) is dict for kind in alternatives(annotation))
    return Any if free_form else None


def key_paths(annotation: Any, prefix: Path = ()) -> Iterator[tuple[Path, type[BaseModel]]]:
    """All paths below a type in the order of the schema, with the section that declares each.

    Lists have one item, 0.
    """
    for section in sections_of(annotation):
        for name, field in section.model_fields.items():
            yield (*prefix, name), section
            yield from key_paths(field.annotation, (*prefix, name))
    if is_list(annotation):
        yield from key_paths(item_annotation(annotation), (*prefix, "0"))
