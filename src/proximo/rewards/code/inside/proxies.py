"""Stand-ins for objects of the other process. Not the messages that they send: that is rpc_peer.py.

What is done with a handle is done where its object is, and a plain value or another handle comes back. Only what a
program needs for an answer is asked of it. Whatever tells it what was expected is not: a `ProgramProxy` refuses to be
compared, has no arithmetic (`abs(f(x) - 0.5)` would show it the 0.5), and is searched by Python's own `in`, which
iterates over it and compares in the verifier. Whether it is true, how long it is and what it holds may be asked: the
program could have returned True, or such a list.

Runs inside the sandbox as well: the standard library alone.
"""

import operator
from collections.abc import Callable
from typing import Any, NoReturn

OPERATORS: dict[str, Callable[..., Any]] = {
    **{"__len__": len, "__iter__": iter, "__next__": next, "__bool__": bool, "__str__": str, "__repr__": repr},
    **{"__int__": int, "__float__": float, "__index__": operator.index},
    **{"__getitem__": operator.getitem, "__setitem__": operator.setitem, "__delitem__": operator.delitem},
}
"""What is asked of the object's own process, and how it is done there. None of it is given what a test expects: only
keys, and what the tests themselves put in."""
ASKED_OF_SETS = frozenset(
    {"difference", "intersection", "isdisjoint", "issubset", "issuperset", "symmetric_difference"}
)
"""Methods by which a set is compared. A set is a plain value: an object that is none is not asked."""


class Handle:
    """A function of the other process, which equals itself alone."""

    __slots__ = ("_number", "_peer")

    def __init__(self, peer: Any, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return asked(self, "call", "", arguments, keywords)


class ProgramProxy(Handle):
    """A handle for the process that grades: much may be asked of it, but not how it compares with something else."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ASKED_OF_SETS:
            _refuse(self)
        return asked(self, "get", name, (), {})

    def __setattr__(self, name: str, value: Any) -> None:
        asked(self, "set", name, (value,), {})

    def __eq__(self, other: object) -> bool:
        return self is other or _refuse(self)

    def __ne__(self, other: object) -> bool:
        return self is not other and _refuse(self)

    def __lt__(self, other: object) -> bool:
        _refuse(self)

    __le__ = __gt__ = __ge__ = __lt__

    def __hash__(self) -> int:
        return id(self)


def number_of(handle: Handle) -> int:
    """The object's number in the other process."""
    return object.__getattribute__(handle, "_number")


def asked(handle: Handle, does: str, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """What the object's process answers."""
    peer = object.__getattribute__(handle, "_peer")
    return peer.ask(handle, does, name, arguments, keywords)


def _refuse(handle: Handle) -> NoReturn:
    peer = object.__getattribute__(handle, "_peer")
    raise peer.refuse("an object of the program is no plain value and cannot be compared")


def _forwarded(name: str) -> Callable[..., Any]:
    def method(self: Handle, *arguments: Any) -> Any:
        return asked(self, "operator", name, arguments, {})

    return method


for _name in OPERATORS:
    setattr(ProgramProxy, _name, _forwarded(_name))
