"""Plain values as trees of JSON and back, with their exact types. Not the messages that carry them: that is
rpc_peer.py.

Nothing of what a program sends is run: a tree is lists, numbers and texts, and only the types that stand here come
out of one. A subclass of one of them is sent as that type, read through its own methods and not through those that the
subclass overrides; so a value that says it equals everything arrives as a plain value or not at all. A number of numpy
is sent as the number of Python that it says it is.

| tree | value |
|---|---|
| null, a boolean, a number, a text | itself |
| `["l", ...]`, `["s", ...]`, `["d", key, value, ...]` | list, set, dict; numbered as they appear |
| `["r", n]` | the list, set or dict with number n once more |
| `["t", ...]`, `["z", ...]` | tuple, frozenset |
| `["c", real, imaginary]`, `["b", text]`, `["R", start, stop, step]` | complex, bytes as Latin-1, range |
| `["T", name]`, `["x", name, ...]` | a type of this table; an exception class with the names of its bases |
| `["o", n]`, `["p", n]` | object n of the sender, object n of the receiver: rpc_peer.py |

Runs inside the sandbox as well: the standard library alone.
"""

import builtins
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

MAX_DEPTH = 100
MAX_SAME_HASH = 100
"""Keys of one set or dict with the same hash: many of them make every look-up slow, and no honest value has them."""
ATOMS = frozenset({type(None), bool, int, float, str})
MUTABLE: dict[Any, str] = {list: "l", dict: "d", set: "s"}
FIXED: dict[Any, str] = {tuple: "t", frozenset: "z"}
MAX_CLASSES = 100
"""Of exceptions: making one takes as long as a thousand numbers."""
TYPES = {each.__name__: each for each in (*ATOMS, *MUTABLE, *FIXED, complex, bytes, range, object)}
SINGLES = {"c": [float] * 2, "b": [str], "R": [int] * 3, "T": [str], "r": [int], "o": [int], "p": [int]}
"""What follows each tag whose tree has a fixed length."""
BASES = (int, float, str, *MUTABLE, *FIXED, complex, bytes)
"""Types whose subclasses are sent as the type itself."""


class RefusedError(ValueError):
    """A value that does not cross; the message says which."""


class TooLargeError(RefusedError):
    """A value that is nested too deeply, or takes too many bytes or digits."""


class Encoder:
    """Values to trees. `table` holds the lists, dicts and sets by number, those that the other side knows first."""

    def __init__(self, table: list[Any], refer: Callable[[Any], list[Any]]) -> None:
        """`refer` gives the tree of an object that is no plain value, or raises RefusedError."""
        self.table = table
        self._numbers = {id(value): number for number, value in enumerate(table)}
        self._refer = refer

    def tree(self, value: Any, depth: int = MAX_DEPTH) -> Any:
        """Raises RefusedError for what is nested too deeply, and whatever `refer` raises."""
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
            return [FIXED[kind], *(self.tree(each, depth - 1) for each in kind.__iter__(value))]
        return self._single(kind, value)

    def contents(self, number: int) -> list[Any]:
        """The tree of what list, dict or set `number` holds now."""
        value = self.table[number]
        return self._filled(_plain_kind(type(value)), value, MAX_DEPTH)

    def _filled(self, kind: Any, value: Any, depth: int) -> list[Any]:
        if kind is dict:
            pairs = dict.items(value)
            return ["d", *(self.tree(each, depth - 1) for pair in pairs for each in pair)]
        return [MUTABLE[kind], *(self.tree(each, depth - 1) for each in kind.__iter__(value))]

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


class Decoder:
    """Trees to values. `table` as in Encoder."""

    def __init__(self, table: list[Any], resolve: Callable[[str, int], Any], classes: dict[str, type]) -> None:
        """`resolve` gives the object for `["o", n]` and `["p", n]`, or raises RefusedError. `classes` keeps the
        exception classes that were made, so that one name is one class."""
        self.table = table
        self._resolve = resolve
        self._classes = classes

    def value(self, tree: Any, depth: int = MAX_DEPTH) -> Any:
        """Raises RefusedError for every tree that is not of the table above."""
        if type(tree) in ATOMS:
            return tree
        if depth == 0 or type(tree) is not list or not tree or type(tree[0]) is not str:
            raise RefusedError("not a value of the protocol")
        tag, items = tree[0], tree[1:]
        if tag in ("l", "d", "s"):
            made: Any = {"l": list, "d": dict, "s": set}[tag]()
            self.table.append(made)
            fill(made, self.contents(tree, depth))
            return made
        if tag in ("t", "z"):
            found = [self.value(each, depth - 1) for each in items]
            return tuple(found) if tag == "t" else frozenset(_sparse(found))
        return self._single(tag, items)

    def contents(self, tree: Any, depth: int = MAX_DEPTH) -> Any:
        """What is in a list, dict or set, to be given to `fill`."""
        if type(tree) is not list or not tree or tree[0] not in ("l", "d", "s"):
            raise RefusedError("not the contents of a list, dict or set")
        found = [self.value(each, depth - 1) for each in tree[1:]]
        if tree[0] == "l":
            return found
        if tree[0] == "s":
            return set(_sparse(found))
        if len(found) % 2:
            raise RefusedError("a dict has a key without a value")
        return dict(zip(_sparse(found[::2]), found[1::2], strict=True))

    def _single(self, tag: str, items: list[Any]) -> Any:
        kinds = [type(each) for each in items]
        wanted = SINGLES.get(tag)
        if kinds != wanted and not (tag == "x" and set(kinds) == {str}):
            raise RefusedError("not a value of the protocol")
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
            raise RefusedError(f"not a value of the protocol: {error}") from error

    def _numbered(self, number: int) -> Any:
        if not 0 <= number < len(self.table):
            raise RefusedError("a list, set or dict that was never sent")
        return self.table[number]


def fill(container: Any, contents: Any) -> None:
    """Puts `contents` in the place of what a list, dict or set holds."""
    if isinstance(container, list):
        list.__setitem__(container, slice(None), contents)
        return
    base = dict if isinstance(container, dict) else set
    base.clear(container)
    base.update(container, contents)


def exception_names(kind: type) -> list[str]:
    """The class and its bases, up to the first that is built in."""
    names = []
    for each in kind.__mro__:
        names.append(each.__name__)
        if getattr(builtins, each.__name__, None) is each:
            break
    return names


def exception_class(names: Sequence[str], made: dict[str, type]) -> type:
    """The built-in exception of the last name, or a class of the first name below it, kept in `made`.

    Raises RefusedError where the first is no name, or `made` is full.
    """
    base = getattr(builtins, names[-1], None)
    if not (isinstance(base, type) and issubclass(base, Exception)):
        base = Exception
    if base.__name__ == names[0]:
        return base
    if not names[0].isidentifier():
        raise RefusedError("the class of an exception has no name")
    if names[0] not in made:
        if len(made) == MAX_CLASSES:
            raise RefusedError(f"more than {MAX_CLASSES} classes of exceptions")
        made[names[0]] = type(names[0], (base,), {})
    return made[names[0]]


def _plain_kind(kind: type) -> Any:
    """The type as which values of `kind` are sent: for a subclass of a plain type that type."""
    if kind in ATOMS:
        return kind
    return next((base for base in BASES if issubclass(kind, base)), kind)


def _number_of_numpy(value: Any) -> bool | int | float | complex | None:
    """None for everything else, its arrays included."""
    if type(value).__module__ != "numpy" or getattr(value, "shape", None) != ():
        return None
    number = value.item()
    return number if type(number) in (bool, int, float, complex) else None


def _reduced(kind: type, value: Any) -> Any:
    convert: dict[type, Callable[[Any], Any]] = {int: int.__int__, float: float.__float__, str: str.__str__}
    return convert[kind](value)


def _sparse(keys: list[Any]) -> list[Any]:
    """Raises RefusedError where keys cannot be hashed, or too many have the same hash."""
    try:
        hashes = Counter(map(hash, keys))
    except TypeError as error:
        raise RefusedError("an element of a set or a key of a dict cannot be hashed") from error
    if hashes and max(hashes.values()) > MAX_SAME_HASH:
        raise RefusedError(f"more than {MAX_SAME_HASH} keys have the same hash")
    return keys
