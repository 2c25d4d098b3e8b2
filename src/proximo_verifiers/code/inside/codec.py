"""Encodes plain values as JSON trees and decodes them with their exact types.

Decoding runs no code of the sender: a tree consists of lists, numbers and texts, and only the types in the table below
result from it. An instance of a subclass is sent as its plain base type, read through the methods of that base and not
through overridden ones. So a value that claims to equal everything arrives as a plain value or not at all. A numpy
scalar is sent as the Python number that its `item` returns.

| tree | value |
|---|---|
| null, a boolean, a number, a text | itself |
| `["l", ...]`, `["s", ...]`, `["d", key, value, ...]` | list, set, dict; numbered as they appear |
| `["r", n]` | the list, set or dict with number n once more |
| `["t", ...]`, `["z", ...]` | tuple, frozenset |
| `["c", real, imaginary]`, `["b", text]`, `["R", start, stop, step]` | complex, bytes as Latin-1, range |
| `["T", name]`, `["x", name, ...]` | a type of this table; an exception class with the names of its bases |
| `["o", n]`, `["p", n]` | object n of the sender, object n of the receiver: rpc_peer.py |

Runs inside the sandbox as well, so it may import the standard library only.
"""

import builtins
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

MAX_DEPTH = 100
MAX_SAME_HASH = 100
"""Largest number of keys of a set or dict with the same hash. More would make look-ups slow on purpose."""
ATOMS = frozenset({type(None), bool, int, float, str})
MUTABLE: dict[Any, str] = {list: "l", dict: "d", set: "s"}
FIXED: dict[Any, str] = {tuple: "t", frozenset: "z"}
MAX_CLASSES = 100
"""Largest number of exception classes, since making one is as slow as decoding a thousand numbers."""
TYPES = {item.__name__: item for item in (*ATOMS, *MUTABLE, *FIXED, complex, bytes, range, object)}
SINGLES = {"c": [float] * 2, "b": [str], "R": [int] * 3, "T": [str], "r": [int], "o": [int], "p": [int]}
"""Types of the items after each tag of a tree of fixed length."""
BASES = (int, float, str, *MUTABLE, *FIXED, complex, bytes)
"""Types whose subclasses are sent as the base type."""


class ValueRefusedError(ValueError):
    """A value that cannot be encoded or decoded; the message says why."""


class TooLargeError(ValueRefusedError):
    """A value that is nested too deeply, or takes too many bytes or digits."""


class ValueEncoder:
    """Encodes values as trees. `table` numbers lists, dicts and sets, beginning with those that the other side has."""

    def __init__(self, table: list[Any], refer: Callable[[Any], list[Any]]) -> None:
        """`refer` returns the tree for an object that is not a plain value, or raises ValueRefusedError."""
        self.table = table
        self._numbers = {id(value): number for number, value in enumerate(table)}
        self._refer = refer

    def tree(self, value: Any, depth: int = MAX_DEPTH) -> Any:
        """The tree of a value. Raises TooLargeError for deep nesting, and whatever `refer` raises."""
        kind = _plain_kind(type(value))
        if kind in ATOMS:
            return value if type(value) is kind else _reduced(kind, value)
        if depth == 0:
            raise TooLargeError(f"a value is nested more than {MAX_DEPTH} deep")
        if kind in MUTABLE:
            number = self._numbers.setdefault(id(value), len(self.table))
            if number < len(self.table):
                return ["r", number]
            self.table.append(value)
            return self._filled(kind, value, depth)
        if kind in FIXED:
            return [FIXED[kind], *(self.tree(item, depth - 1) for item in kind.__iter__(value))]
        return self._single(kind, value)

    def contents(self, number: int) -> list[Any]:
        """The tree of the current contents of container `number`."""
        value = self.table[number]
        return self._filled(_plain_kind(type(value)), value, MAX_DEPTH)

    def _filled(self, kind: Any, value: Any, depth: int) -> list[Any]:
        if kind is dict:
            pairs = dict.items(value)
            return ["d", *(self.tree(item, depth - 1) for pair in pairs for item in pair)]
        return [MUTABLE[kind], *(self.tree(item, depth - 1) for item in kind.__iter__(value))]

    def _single(self, kind: type, value: Any) -> list[Any]:
        if kind is complex:
            return ["c", complex(value).real, complex(value).imag]
        if kind is bytes:
            return ["b", bytes.decode(value, "latin-1")]
        if kind is range:
            return ["R", value.start, value.stop, value.step]
        if issubclass(kind, type) and TYPES.get(value.__name__) is value:
            return ["T", value.__name__]
        if issubclass(kind, type) and issubclass(value, Exception):
            return ["x", *exception_names(value)]
        number = _number_of_numpy(value)
        return self._refer(value) if number is None else self.tree(number)


class ValueDecoder:
    """Decodes trees. `table` numbers containers as in ValueEncoder."""

    def __init__(self, table: list[Any], resolve: Callable[[str, int], Any], classes: dict[str, type]) -> None:
        """`resolve` returns the object for `["o", n]` and `["p", n]`, or raises ValueRefusedError.

        `classes` caches the exception classes by name, so that one name is one class.
        """
        self.table = table
        self._resolve = resolve
        self._classes = classes

    def value(self, tree: Any, depth: int = MAX_DEPTH) -> Any:
        """The value of a tree. Raises ValueRefusedError for a tree that is not in the table of this module."""
        if type(tree) in ATOMS:
            return tree
        if depth == 0 or type(tree) is not list or not tree or type(tree[0]) is not str:
            raise ValueRefusedError("not a value of the protocol")
        tag, items = tree[0], tree[1:]
        if tag in ("l", "d", "s"):
            made: Any = {"l": list, "d": dict, "s": set}[tag]()
            self.table.append(made)
            fill(made, self.contents(tree, depth))
            return made
        if tag in ("t", "z"):
            members = [self.value(item, depth - 1) for item in items]
            return tuple(members) if tag == "t" else frozenset(_check_keys(members))
        return self._single(tag, items)

    def contents(self, tree: Any, depth: int = MAX_DEPTH) -> Any:
        """The decoded contents of a list, dict or set, for `fill`."""
        if type(tree) is not list or not tree or tree[0] not in ("l", "d", "s"):
            raise ValueRefusedError("not the contents of a list, dict or set")
        members = [self.value(item, depth - 1) for item in tree[1:]]
        if tree[0] == "l":
            return members
        if tree[0] == "s":
            return set(_check_keys(members))
        if len(members) % 2:
            raise ValueRefusedError("a dict has a key without a value")
        return dict(zip(_check_keys(members[::2]), members[1::2], strict=True))

    def _single(self, tag: str, items: list[Any]) -> Any:
        kinds = [type(item) for item in items]
        wanted = SINGLES.get(tag)
        if kinds != wanted and not (tag == "x" and set(kinds) == {str}):
            raise ValueRefusedError("not a value of the protocol")
        read: dict[str, Callable[..., Any]] = {
            "c": complex,
            "b": lambda text: text.encode("latin-1"),
            "R": range,
            "T": TYPES.__getitem__,
            "x": lambda *names: exception_class(names, self._classes),
            "r": self._numbered,
            "o": lambda number: self._resolve("o", number),
            "p": lambda number: self._resolve("p", number),
        }
        try:
            return read[tag](*items)
        except (KeyError, ValueError) as error:
            raise ValueRefusedError(f"not a value of the protocol: {error}") from error

    def _numbered(self, number: int) -> Any:
        if not 0 <= number < len(self.table):
            raise ValueRefusedError("a list, set or dict that was never sent")
        return self.table[number]


def fill(container: Any, contents: Any) -> None:
    """Replaces the contents of a list, dict or set."""
    if isinstance(container, list):
        list.__setitem__(container, slice(None), contents)
        return
    base = dict if isinstance(container, dict) else set
    base.clear(container)
    base.update(container, contents)


def exception_names(kind: type) -> list[str]:
    """The names of the class and its bases, up to the first builtin."""
    names = []
    for item in kind.__mro__:
        names.append(item.__name__)
        if getattr(builtins, item.__name__, None) is item:
            break
    return names


def exception_class(names: Sequence[str], made: dict[str, type]) -> type:
    """The builtin exception of the last name, or a subclass of it with the first name, which is cached in `made`.

    Raises ValueRefusedError if the first name is not an identifier, or `made` is full.
    """
    base = getattr(builtins, names[-1], None)
    if not (isinstance(base, type) and issubclass(base, Exception)):
        base = Exception
    if base.__name__ == names[0]:
        return base
    if not names[0].isidentifier():
        raise ValueRefusedError("the class of an exception has no name")
    if names[0] not in made:
        if len(made) == MAX_CLASSES:
            raise ValueRefusedError(f"more than {MAX_CLASSES} classes of exceptions")
        made[names[0]] = type(names[0], (base,), {})
    return made[names[0]]


def _plain_kind(kind: type) -> Any:
    """The type as which values of `kind` are sent: the plain base type, else `kind` itself."""
    if kind in ATOMS:
        return kind
    return next((base for base in BASES if issubclass(kind, base)), kind)


def _number_of_numpy(value: Any) -> bool | int | float | complex | None:
    """The Python number of a numpy scalar; None for anything else, arrays included."""
    if type(value).__module__ != "numpy" or getattr(value, "shape", None) != ():
        return None
    number = value.item()
    return number if type(number) in (bool, int, float, complex) else None


def _reduced(kind: type, value: Any) -> Any:
    convert: dict[type, Callable[[Any], Any]] = {int: int.__int__, float: float.__float__, str: str.__str__}
    return convert[kind](value)


def _check_keys(keys: list[Any]) -> list[Any]:
    """Returns the keys. Raises ValueRefusedError if a key is unhashable, or too many have the same hash."""
    try:
        hashes = Counter(map(hash, keys))
    except TypeError as error:
        raise ValueRefusedError("an element of a set or a key of a dict cannot be hashed") from error
    if hashes and max(hashes.values()) > MAX_SAME_HASH:
        raise ValueRefusedError(f"more than {MAX_SAME_HASH} keys have the same hash")
    return keys
