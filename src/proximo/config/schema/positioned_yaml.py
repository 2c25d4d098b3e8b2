"""Parses YAML into plain values and keeps the line of each key, for error messages.

The result has only mappings, lists and scalars, so parsing is safe. Duplicate keys are errors. Anchors, aliases and
merge keys work.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml
from yaml.reader import ReaderError

from proximo.config.schema.scalars import plain_scalar
from proximo.errors import ConfigError

MERGE = "<<"
MAX_VALUES = 100_000
"""Maximum number of values in a document, with aliases expanded."""
HINTS = {
    "found character '\\t' that cannot start any token": "indent with spaces, not with tabs",
    "found character '@' that cannot start any token": 'put quotes around it, as in path: "@sft"',
    "found character '%' that cannot start any token": "put quotes around it",
    "found character '`' that cannot start any token": "put quotes around it",
    "mapping values are not allowed here": "put quotes around text that holds a colon, and check the indentation",
}


class _PlainLoader(yaml.BaseLoader):
    """Tags unquoted scalars as `plain`, so that `plain_scalar` resolves them by YAML 1.2 instead of 1.1."""

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        if kind is yaml.ScalarNode and implicit[0]:
            return "plain"
        return super().resolve(kind, value, implicit)


@dataclass(frozen=True, kw_only=True)
class Document:
    """A parsed YAML document: its values and their positions."""

    origin: str
    """Name of the file, for error messages."""
    text: str
    data: Any
    root: yaml.Node | None

    def line_of(self, path: tuple[str, ...]) -> int | None:
        """Line number (from 1) of the longest prefix of `path` that exists in the document; None if there is none."""
        line, node = None, self.root
        for piece in path:
            child = _child(node, piece)
            if child is None:
                return line
            line, node = child[0].start_mark.line + 1, child[1]
        return line


def parse_document(text: str, origin: str) -> Document:
    """Parse one YAML document. Raises ConfigError with file and line."""
    try:
        root = yaml.compose(text, Loader=_PlainLoader)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_syntax_message(error, origin)) from error
    except ReaderError as error:
        raise ConfigError(f"{origin}: character {error.position + 1} is not allowed in YAML: {error.reason}") from error
    except RecursionError as error:
        raise ConfigError(f"{origin}: lists or mappings are nested too deeply") from error
    if root is not None:
        _check_expanded_size(root, origin)
    data = None if root is None else _value(root, origin, ())
    return Document(origin=origin, text=text, data=data, root=root)


def _syntax_message(error: yaml.MarkedYAMLError, origin: str) -> str:
    mark = error.problem_mark or error.context_mark
    where = f"{origin}, line {mark.line + 1}, column {mark.column + 1}" if mark else origin
    problem = str(error.problem or error.context)
    hint = f"; {HINTS[problem]}" if problem in HINTS else ""
    return f"{where}: not valid YAML: {problem}{hint}"


def _check_expanded_size(root: yaml.Node, origin: str) -> None:
    """Raises ConfigError for nested aliases that would expand to more values than fit into memory."""
    sizes: dict[int, int] = {}
    size = _expanded_size(root, sizes)
    if size > MAX_VALUES and size > len(sizes):
        raise ConfigError(
            f"{origin}: its aliases make {len(sizes):,} values into {size:.3g}, and {MAX_VALUES:,} are the most: "
            "write out what is meant"
        )


def _expanded_size(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Number of values of a node with aliases expanded, itself included. A recursive alias counts once."""
    if id(node) not in sizes:
        sizes[id(node)] = 1
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        for part in parts:
            child = part[1] if isinstance(part, tuple) else part
            sizes[id(node)] += _expanded_size(child, sizes)
    return sizes[id(node)]


def _value(node: yaml.Node, origin: str, parents: tuple[yaml.Node, ...]) -> Any:
    if any(parent is node for parent in parents):
        raise ConfigError(f"{origin}, line {node.start_mark.line + 1}: an alias refers to its own anchor")
    inside = (*parents, node)
    match node:
        case yaml.ScalarNode(tag="plain"):
            return plain_scalar(node.value)
        case yaml.ScalarNode(tag="tag:yaml.org,2002:str"):
            return node.value
        case yaml.SequenceNode(tag="tag:yaml.org,2002:seq"):
            return [_value(item, origin, inside) for item in node.value]
        case yaml.MappingNode(tag="tag:yaml.org,2002:map"):
            return _mapping(node, origin, inside)
    raise ConfigError(
        f"{origin}, line {node.start_mark.line + 1}: the tag {node.tag} is not allowed: a recipe holds plain "
        "values only"
    )


def _mapping(node: yaml.MappingNode, origin: str, parents: tuple[yaml.Node, ...]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    own: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        key, line = _key(key_node, origin), key_node.start_mark.line + 1
        if key in lines:
            raise ConfigError(f"{origin}, line {line}: {key} is given twice, first on line {lines[key]}")
        lines[key] = line
        if key == MERGE:
            for part in _merged_nodes(value_node):
                merged = {**_merged_mapping(part, origin, parents), **merged}
        else:
            own[key] = _value(value_node, origin, parents)
    return {**merged, **own}


def _key(node: yaml.Node, origin: str) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise ConfigError(f"{origin}, line {node.start_mark.line + 1}: a key must be a word, not a list or a mapping")
    return node.value


def _merged_nodes(node: yaml.Node) -> list[yaml.Node]:
    return node.value if isinstance(node, yaml.SequenceNode) else [node]


def _merged_mapping(node: yaml.Node, origin: str, parents: tuple[yaml.Node, ...]) -> dict[str, Any]:
    value = _value(node, origin, parents)
    if not isinstance(value, dict):
        raise ConfigError(f"{origin}, line {node.start_mark.line + 1}: << needs a mapping")
    return value


def _child(node: yaml.Node | None, piece: str) -> tuple[yaml.Node, yaml.Node] | None:
    """The node of the key `piece` (for a list the item itself) and the node of its value; None if there is none."""
    if isinstance(node, yaml.SequenceNode) and piece.isdecimal() and int(piece) < len(node.value):
        item = node.value[int(piece)]
        return item, item
    if isinstance(node, yaml.MappingNode):
        return next(_entries(node, piece), None)
    return None


def _entries(node: yaml.MappingNode, key: str) -> Iterator[tuple[yaml.Node, yaml.Node]]:
    """Entries with that key: the mapping's own come before merged ones."""
    for key_node, value_node in node.value:
        if isinstance(key_node, yaml.ScalarNode) and key_node.value == key:
            yield key_node, value_node
    for key_node, value_node in node.value:
        if key_node.value == MERGE:
            for part in _merged_nodes(value_node):
                if isinstance(part, yaml.MappingNode):
                    yield from _entries(part, key)
