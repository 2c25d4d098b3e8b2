"""Proxies for objects of the other process.

An operation on a proxy runs in the process of its object, and returns a plain value or another proxy. An operation that
would tell the program an expected value is refused. So a `ProgramProxy` cannot be compared, and has no arithmetic:
`abs(f(x) - 0.5)` would show the 0.5 to the program. `in` iterates over the proxy and compares in the tests' process.
Truth, length and items may be asked for, because the program could as well have returned True, or such a list.

Runs inside the sandbox as well, so it may import the standard library only.
"""

import operator
from collections.abc import Callable
from typing import Any, NoReturn

OPERATORS: dict[str, Callable[..., Any]] = {
    **{"__len__": len, "__iter__": iter, "__next__": next, "__bool__": bool, "__str__": str, "__repr__": repr},
    **{"__int__": int, "__float__": float, "__index__": operator.index},
    **{"__getitem__": operator.getitem, "__setitem__": operator.setitem, "__delitem__": operator.delitem},
}
"""Operations that run in the process of the object. They get keys and values that tests store, never expected
values."""
SET_METHODS = frozenset({"difference", "intersection", "isdisjoint", "issubset", "issuperset", "symmetric_difference"})
"""Methods that compare sets, which are refused: a real set is a plain value and never behind a proxy."""


class FunctionProxy:
    """A proxy of a function. It equals only itself."""

    __slots__ = ("_number", "_peer")

    def __init__(self, peer: Any, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return ask(self, "call", "", arguments, keywords)


class ProgramProxy(FunctionProxy):
    """A proxy for tests of an object of the program. It supports many operations, but no comparison."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in SET_METHODS:
            _refuse(self)
        return ask(self, "get", name, (), {})

    def __setattr__(self, name: str, value: Any) -> None:
        ask(self, "set", name, (value,), {})

    def __eq__(self, other: object) -> bool:
        return self is other or _refuse(self)

    def __ne__(self, other: object) -> bool:
        return self is not other and _refuse(self)

    def __lt__(self, other: object) -> bool:
        _refuse(self)

    __le__ = __gt__ = __ge__ = __lt__

    def __hash__(self) -> int:
        return id(self)


def number_of(proxy: FunctionProxy) -> int:
    """The object's number in the other process."""
    return object.__getattribute__(proxy, "_number")


def ask(proxy: FunctionProxy, operation: str, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """The result of an operation in the process of the object."""
    peer = object.__getattribute__(proxy, "_peer")
    return peer.ask(proxy, operation, name, arguments, keywords)


def _refuse(proxy: FunctionProxy) -> NoReturn:
    peer = object.__getattribute__(proxy, "_peer")
    raise peer.refuse("an object of the program is not a plain value and cannot be compared")


def _forwarded(name: str) -> Callable[..., Any]:
    def method(self: FunctionProxy, *arguments: Any) -> Any:
        return ask(self, "operator", name, arguments, {})

    return method


for _name in OPERATORS:
    setattr(ProgramProxy, _name, _forwarded(_name))
