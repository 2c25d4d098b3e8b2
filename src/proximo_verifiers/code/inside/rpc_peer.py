"""Remote procedure calls between two processes over a socket. Values are encoded by codec.py.

The program's process and the tests' process each have a `Peer`. What is not a plain value stays in its process, and the
other side holds a proxy of it: an operation on it runs in the process of its object, and returns a plain value or
another proxy. An operation that would tell the program an expected value is refused. So a `ProgramProxy` cannot be
compared, and has no arithmetic: `abs(f(x) - 0.5)` would show the 0.5 to the program. `in` iterates over the proxy and
compares in the tests' process. Truth, length and items may be asked for, because the program could as well have
returned True, or such a list.

Runs inside the sandbox as well, so it may import the standard library only.
"""

import json
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

from proximo_verifiers.code.inside.codec import TooLargeError, ValueDecoder, ValueEncoder, ValueRefusedError, fill

OPERATORS: dict[str, Callable[..., Any]] = {
    **{"__len__": len, "__iter__": iter, "__next__": next, "__bool__": bool, "__str__": str, "__repr__": repr},
    **{"__int__": int, "__float__": float, "__index__": operator.index},
    **{"__getitem__": operator.getitem, "__setitem__": operator.setitem, "__delitem__": operator.delitem},
}
"""Operations that run in the process of the object. They get keys and values that tests store, never expected
values."""
SET_METHODS = frozenset({"difference", "intersection", "isdisjoint", "issubset", "issuperset", "symmetric_difference"})
"""Methods that compare sets, which are refused: a real set is a plain value and never behind a proxy."""
MAX_BYTES = 4 * 2**20
"""Largest message, in bytes."""
MAX_TEXT = 500
"""Largest length of an exception's text."""
GONE = "the program has ended"
BROKE = "the program broke the protocol"
Message = list[Any]


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


class ClosedError(Exception):
    """The other process has ended, or broke the protocol."""


class NotPlainError(TypeError):
    """A value that must be plain is not."""


class ProgramExitError(Exception):
    """The called function raised SystemExit or KeyboardInterrupt."""


class Peer:
    """One end of the socket."""

    def __init__(
        self, descriptor: int, *, opens: Sequence[str], handle: type[FunctionProxy], roots: Sequence[Any] = ()
    ) -> None:
        """`opens` are the operations that the other side may use on objects of this side: `call`, `get`, `set`,
        `operator`. `roots` are the objects 0, 1, ... of this side. `handle` is the class of proxies for the other side.
        """
        self._descriptor = descriptor
        self._opens = frozenset(opens)
        self._objects = list(roots)
        self._numbers = {id(each): number for number, each in enumerate(self._objects)}
        self._handle_class = handle
        self._handles: dict[int, FunctionProxy] = {}
        self._classes: dict[str, type] = {}
        self.closed: str | None = None
        """The reason why the channel is closed; None while it is open."""
        self.raised: BaseException | None = None
        """The last exception from the other side."""
        self.heard = False
        """True once a plain value came from the other side."""
        self.refused: str | None = None
        """The reason of the last refusal. The test runner reads it, so that an `except` of a test cannot hide it."""

    # Messages

    def send(self, message: Message) -> None:
        """Sends a message. Raises TooLargeError if it is too large, ClosedError if the other side has ended."""
        try:
            data = json.dumps(message, separators=(",", ":")).encode("ascii")
        except ValueError as error:
            raise TooLargeError(f"a value cannot be encoded: {error}") from error
        if len(data) > MAX_BYTES:
            raise TooLargeError(f"a value takes {len(data)} bytes, more than {MAX_BYTES}")
        view = memoryview(len(data).to_bytes(4, "big") + data)
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError as error:
            raise ClosedError(GONE) from error

    def receive(self) -> Message:
        """The next message. Raises ClosedError if the other side has ended or sent an invalid message."""
        size = int.from_bytes(self._read(4), "big")
        if size > MAX_BYTES:
            raise ClosedError(BROKE)
        message = parsed(self._read(size))
        if message is None:
            raise ClosedError(BROKE)
        return message

    def _read(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            try:
                part = os.read(self._descriptor, min(size - len(parts), 2**16))
            except OSError:
                part = b""
            if not part:
                raise ClosedError(GONE)
            parts += part
        return bytes(parts)

    # Asking

    def root(self, number: int) -> FunctionProxy:
        """The proxy of a root object of the other side."""
        return self._handle(number)

    def ask(
        self,
        handle: FunctionProxy,
        does: str,
        name: str,
        arguments: tuple[Any, ...] = (),
        keywords: Mapping[str, Any] = MappingProxyType({}),
    ) -> Any:
        """Runs an operation on the other side. Changes of containers that were passed are applied here.

        Raises the exception of the other side under its name, ClosedError, NotPlainError for a refused result, and
        ValueRefusedError for an argument that cannot be sent.
        """
        if self.closed is not None:
            raise ClosedError(self.closed)
        table: list[Any] = []
        encoded = ValueEncoder(table, self._refer).tree((arguments, tuple(keywords.items())))
        try:
            self.send(["ask", number_of(handle), does, name, encoded])
            return self._reply(self.receive(), table)
        except ClosedError as closed:
            self.closed = str(closed)
            raise

    def _reply(self, message: Message, table: list[Any]) -> Any:
        while message[0] == "ask":
            self.answer(message)
            message = self.receive()
        try:
            kind, contents, tree = message
            decoder = ValueDecoder(table, self._resolve, self._classes)
            self._update(decoder, contents)
            value = decoder.value(tree)
        except (ValueRefusedError, ValueError, RecursionError) as error:
            raise self.refuse(f"the program's value was refused: {error}") from error
        self.heard |= bool(contents) or not isinstance(value, FunctionProxy)
        if kind == "value":
            return value
        self.raised = self._raised(kind, value)
        raise self.raised

    def _update(self, decoder: ValueDecoder, contents: Any) -> None:
        if type(contents) is not list or len(contents) > len(decoder.table):
            raise ValueRefusedError("not the contents of the arguments")
        decoded = [decoder.contents(tree) for tree in contents]
        for number, value in enumerate(decoded):
            if type(value) is not _container_type(decoder.table[number]):
                raise ValueRefusedError("an argument changed its type")
            fill(decoder.table[number], value)

    def _raised(self, kind: str, value: Any) -> Exception:
        if kind == "refused":
            return self.refuse(f"the program's value was refused: {value}")
        if kind != "raised" or type(value) is not tuple or len(value) != 2 or type(value[1]) is not tuple:
            return self.refuse(BROKE)
        kinds, arguments = value
        if not (isinstance(kinds, type) and issubclass(kinds, Exception)):
            self.refused = f"the program ended itself: {kinds}"[: MAX_TEXT // 2]
            return ProgramExitError(self.refused)
        try:
            error = kinds.__new__(kinds, *arguments)
        except TypeError:
            error = Exception(*arguments)
        error.args = arguments
        return error

    def refuse(self, reason: str) -> NotPlainError:
        """The exception for a refused value. Records the reason, so that no test can hide it."""
        self.refused = reason[: MAX_TEXT // 2]
        return NotPlainError(self.refused)

    # Answering

    def serve(self) -> None:
        """Answers requests until the channel closes."""
        try:
            while True:
                message = self.receive()
                if message[0] == "ask":
                    self.answer(message)
        except ClosedError:
            return

    def answer(self, message: Message) -> None:
        """Runs a requested operation and sends the result. Raises ClosedError."""
        table: list[Any] = []
        try:
            _, number, does, name, encoded = message
            arguments, pairs = ValueDecoder(table, self._resolve, self._classes).value(encoded)
            keywords = dict(pairs)
            self.heard = True
            target = self._own(number, does)
        except (ValueRefusedError, ValueError, TypeError, RecursionError) as error:
            self.send(["refused", [], f"the request was refused: {error}"])
            return
        self.deliver(table, lambda: _done(target, does, name, arguments, keywords))

    def deliver(self, table: list[Any], work: Callable[[], Any]) -> None:
        """Sends what `work` returns or raises, with the current contents of the containers in `table`."""
        known = len(table)
        encoder = ValueEncoder(table, self._refer)
        try:
            kind, result = "value", work()
        except BaseException as error:
            kind, result = "raised", _description(error)
        try:
            self._send_result(encoder, known, kind, result)
        except (ValueRefusedError, RecursionError) as error:
            self.send(["refused", [], str(error)[:MAX_TEXT]])

    def _send_result(self, encoder: ValueEncoder, known: int, kind: str, result: Any) -> None:
        contents = [encoder.contents(number) for number in range(known)]
        try:
            tree = encoder.tree(result)
        except ValueRefusedError:
            if kind == "value":
                raise
            # If the arguments of an exception cannot be encoded, send its text.
            tree = encoder.tree((result[0], (_text(result[1]),)))
        self.send([kind, contents, tree])

    # Objects

    def _own(self, number: Any, does: Any) -> Any:
        if does not in self._opens or type(number) is not int or not 0 <= number < len(self._objects):
            raise ValueRefusedError(f"an operation that is not allowed: {does}")
        return self._objects[number]

    def _refer(self, value: Any) -> list[Any]:
        if issubclass(type(value), FunctionProxy):
            return ["p", number_of(value)]
        if "get" not in self._opens and not callable(value):
            raise ValueRefusedError(f"an object of class {type(value).__name__} is not a plain value")
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)
        return ["o", number]

    def _resolve(self, tag: str, number: int) -> Any:
        if tag == "o":
            return self._handle(number)
        if not 0 <= number < len(self._objects):
            raise ValueRefusedError("an object that was never sent")
        return self._objects[number]

    def _handle(self, number: int) -> FunctionProxy:
        return self._handles.setdefault(number, self._handle_class(self, number))


def parsed(data: bytes) -> Message | None:
    """The message in these bytes, or None if they are not one."""
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        return None
    is_message = type(message) is list and message and type(message[0]) is str
    return message if is_message else None


def _done(target: Any, does: str, name: str, arguments: Sequence[Any], keywords: dict[str, Any]) -> Any:
    if does == "call":
        return target(*arguments, **keywords)
    if does == "set":
        return setattr(target, name, *arguments)
    if does == "operator":
        return OPERATORS[name](target, *arguments)
    return getattr(target, name)


def _description(error: BaseException) -> tuple[Any, tuple[Any, ...]]:
    kind = type(error)
    return (kind if issubclass(kind, Exception) else kind.__name__), tuple(error.args)


def _text(arguments: tuple[Any, ...]) -> str:
    try:
        return ", ".join(map(str, arguments))[:MAX_TEXT]
    except Exception:
        return "an exception without a text"


def _container_type(container: Any) -> type:
    return next(base for base in (list, dict, set) if isinstance(container, base))
