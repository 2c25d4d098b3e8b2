"""Stand-ins for objects of the other process. Not the messages that they send: that is peer.py.

What is done with a handle is done where its object is, and a plain value comes back. Comparing is not: whether an
object of the program equals what was expected is nothing that the program may be asked, so a `JudgedHandle` refuses to
be compared. Whether it is true may be asked: the program could have returned True.

Runs inside the sandbox as well: the standard library alone.
"""

import operator
from collections.abc import Callable
from typing import Any, NoReturn

OPERATORS: dict[str, Callable[..., Any]] = {
    **{"__len__": len, "__iter__": iter, "__next__": next, "__bool__": bool, "__str__": str, "__repr__": repr},
    **{"__int__": int, "__float__": float, "__index__": operator.index, "__abs__": abs, "__neg__": operator.neg},
    **{"__contains__": operator.contains, "__getitem__": operator.getitem},
    **{"__setitem__": operator.setitem, "__delitem__": operator.delitem},
    **{
        "__add__": operator.add,
        "__radd__": lambda a, b: b + a,
        "__sub__": operator.sub,
        "__rsub__": lambda a, b: b - a,
    },
    **{"__mul__": operator.mul, "__rmul__": lambda a, b: b * a, "__pow__": operator.pow, "__mod__": operator.mod},
    **{"__truediv__": operator.truediv, "__rtruediv__": lambda a, b: b / a, "__floordiv__": operator.floordiv},
}
"""What is asked of the object's own process, and how it is done there. What compares is not among it."""


class Handle:
    """A function of the other process, which equals itself alone."""

    __slots__ = ("_number", "_peer")

    def __init__(self, peer: Any, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return asked(self, "call", "", arguments, keywords)


class JudgedHandle(Handle):
    """A handle for whoever judges: everything may be asked of it but how it compares with something else."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
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
    setattr(JudgedHandle, _name, _forwarded(_name))
