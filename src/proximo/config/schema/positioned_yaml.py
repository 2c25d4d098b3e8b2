"""Reads YAML into plain values, with the line of each key for error messages, and writes it.

Unquoted words follow the core schema of YAML 1.2 (section 10.3.2): `1e-5` is a number, `no`, `on` and `12:30` are text,
`0o17` is octal and `017` is seventeen. The result has only mappings, lists and scalars, so reading is safe. Duplicate
keys are errors. Anchors, aliases and merge keys work.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from io import StringIO
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.representer import RepresenterError
from ruamel.yaml.resolver import VersionedResolver
from ruamel.yaml.tag import Tag

from proximo.errors import ConfigError

MERGE = "<<"
MAX_VALUES = 100_000
"""Maximum number of values in a document, with aliases expanded."""
TAG = "tag:yaml.org,2002:"
# At most 400 digits in an integer, because Python refuses to parse those with thousands.
WORDS = {
    f"{TAG}null": re.compile(r"null|Null|NULL|~|"),
    f"{TAG}bool": re.compile(r"true|True|TRUE|false|False|FALSE"),
    f"{TAG}int": re.compile(r"[-+]?[0-9]{1,400}|0o[0-7]{1,400}|0x[0-9a-fA-F]{1,400}"),
    f"{TAG}float": re.compile(
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?(\.inf|\.Inf|\.INF)|\.nan|\.NaN|\.NAN"
    ),
}
"""Tag -> the unquoted words that have it; all others are text."""
COLLECTIONS = (f"{TAG}seq", f"{TAG}map")
HINT = "indent with spaces, and put quotes around text that holds a colon or begins with a sign, such as @"


class _CoreResolver(VersionedResolver):
    """The core schema. The resolver of ruamel.yaml also takes dates, `0b1` and `1_000` for other values than text."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        tags = (tag for tag, words in WORDS.items() if kind is ScalarNode and implicit[0] and words.fullmatch(value))
        found = next(tags, None)
        return super().resolve(kind, value, (False, True)) if found is None else Tag(suffix=found)

    @property
    def processing_version(self) -> tuple[int, int]:
        return (1, 2)  # also under `%YAML 1.1`


def _yaml() -> YAML:
    yaml = YAML(typ="safe", pure=True)
    yaml.Resolver = _CoreResolver
    return yaml


@dataclass(frozen=True, kw_only=True)
class Document:
    """A parsed YAML document: its values and their positions."""

    origin: str
    """Name of the file, for error messages."""
    text: str
    data: Any
    root: Node | None

    def line_of(self, path: tuple[str, ...]) -> int | None:
        """Line number (from 1) of the longest prefix of `path` that exists in the document; None if there is none."""
        line, node = None, self.root
        for piece in path:
            place, node = _child(node, piece)
            if place is None:
                return line
            line = _line(place)
        return line


def parse_document(text: str, origin: str) -> Document:
    """Parse one YAML document. Raises ConfigError with file and line."""
    yaml = _yaml()
    try:
        root = yaml.compose(text)
        size = 0 if root is None else _checked_size(root, origin, sizes := {})
        if size > MAX_VALUES and size > len(sizes):
            raise ConfigError(
                f"{origin}: its aliases make {len(sizes):,} values into {size:.3g}, and {MAX_VALUES:,} are the most: "
                "write out what is meant"
            )
        data = None if root is None else yaml.constructor.construct_document(root)
    except MarkedYAMLError as error:
        raise ConfigError(_syntax_message(error, origin)) from error
    except ReaderError as error:
        raise ConfigError(f"{origin}: character {error.position + 1} is not allowed in YAML: {error.reason}") from error
    except RecursionError as error:
        raise ConfigError(f"{origin}: lists or mappings are nested too deeply") from error
    return Document(origin=origin, text=text, data=data, root=root)


def plain_scalar(text: str) -> bool | int | float | str | None:
    """The value of an unquoted scalar."""
    yaml = _yaml()
    return yaml.constructor.construct_object(ScalarNode(yaml.resolver.resolve(ScalarNode, text, (True, False)), text))


def as_yaml(tree: Mapping[str, Any]) -> str:
    """Plain values as YAML that is read back as the same values. Raises ConfigError for other objects."""
    yaml, written = _yaml(), StringIO()
    yaml.default_flow_style, yaml.allow_unicode, yaml.width = False, True, 120
    yaml.sort_base_mapping_type_on_output = False
    try:
        yaml.dump(dict(tree), written)
    except RepresenterError as error:
        raise ConfigError(f"the recipe holds an object that is not a plain value: {error}") from error
    return written.getvalue()


def _syntax_message(error: MarkedYAMLError, origin: str) -> str:
    mark = error.problem_mark or error.context_mark
    where = f"{origin}, line {mark.line + 1}, column {mark.column + 1}" if mark else origin
    return f"{where}: not valid YAML: {error.problem or error.context}; {HINT}"


def _checked_size(node: Node, origin: str, sizes: dict[Node, int]) -> int:
    """Number of values of a node with aliases expanded, itself included. `sizes`: of the nodes seen so far.

    Keys become text. Raises ConfigError for what a recipe cannot have: tags, keys that are no words, duplicate keys,
    and aliases that contain themselves.
    """
    at = f"{origin}, line {_line(node)}"
    if node in sizes:
        if not sizes[node]:
            raise ConfigError(f"{at}: an alias refers to its own anchor")
        return sizes[node]
    sizes[node] = 0
    if not _is_plain(node):
        raise ConfigError(f"{at}: the tag {node.tag} is not allowed: a recipe holds plain values only")
    if isinstance(node, MappingNode):
        _check_keys(node, origin)
    parts = [] if isinstance(node, ScalarNode) else node.value
    values = [part[1] if isinstance(part, tuple) else part for part in parts]
    sizes[node] = 1 + sum(_checked_size(value, origin, sizes) for value in values)
    return sizes[node]


def _is_plain(node: Node) -> bool:
    if isinstance(node, ScalarNode):
        return node.tag == f"{TAG}str" or (node.tag in WORDS and bool(WORDS[node.tag].fullmatch(node.value)))
    return node.tag in COLLECTIONS


def _check_keys(node: MappingNode, origin: str) -> None:
    lines: dict[str, int] = {}
    for key, value in node.value:
        at = f"{origin}, line {_line(key)}"
        if not isinstance(key, ScalarNode):
            raise ConfigError(f"{at}: a key must be a word, not a list or a mapping")
        if key.value in lines:
            raise ConfigError(f"{at}: {key.value} is given twice, first on line {lines[key.value]}")
        lines[key.value] = _line(key)
        key.tag = f"{TAG}{'merge' if key.value == MERGE else 'str'}"
        merged = value.value if isinstance(value, SequenceNode) else [value]
        if key.value == MERGE and not all(isinstance(each, MappingNode) for each in merged):
            raise ConfigError(f"{at}: << needs a mapping")


def _child(node: Node | None, piece: str) -> tuple[Node | None, Node | None]:
    """The node of the key `piece` (for a list the item itself) and that of its value; two times None without one."""
    if isinstance(node, SequenceNode) and piece.isdecimal() and int(piece) < len(node.value):
        return node.value[int(piece)], node.value[int(piece)]
    # The values of a mapping that was read begin with those merged into it, the ones that count last.
    entries = reversed(node.value) if isinstance(node, MappingNode) else ()
    return next(((key, value) for key, value in entries if key.value == piece), (None, None))


def _line(node: Node) -> int:
    return node.start_mark.line + 1
