"""The process that runs the program and answers calls of its functions. It never holds an expected value.

The program can read and change everything in this process. By that it gains nothing: it controls its answers anyway.

Runs inside the sandbox, so it may import the standard library only.
"""

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import Any

from proximo_verifiers.code.inside.rpc_peer import MAX_TEXT, FunctionProxy, Peer

CHANNEL = 3
"""The descriptor of the channel."""
OPERATIONS = ("call", "get", "set", "operator")
MISSING = object()


def serve(program: str, *, before: str, seeded: bool) -> None:
    """Runs the program, reports whether it ran, and answers calls of its functions until the channel closes."""
    module = ModuleType("program")
    peer = Peer(CHANNEL, opens=OPERATIONS, handle=FunctionProxy, roots=[module])
    peer.send(_load(module, program, before=before, seeded=seeded))
    peer.serve()
    _leave()


def call_each(program: str, name: str, calls: str, *, before: str, seeded: bool) -> None:
    """Runs the program, calls a function with each list of arguments in the JSON `calls`, and sends the results."""
    module = ModuleType("program")
    peer = Peer(CHANNEL, opens=(), handle=FunctionProxy)
    loaded = _load(module, program, before=before, seeded=seeded)
    peer.send(loaded)
    for arguments in json.loads(calls) if loaded[0] == "ready" else []:
        peer.deliver([], lambda values=arguments: _function(module, name)(*values))
    _leave()


def call_as_tested(
    program: str, calls: Sequence[tuple[str, str, tuple[Any, ...], dict[str, Any]]], *, before: str, seeded: bool
) -> None:
    """Runs the program, makes each of `calls` and sends the results, or the exceptions with their texts.

    A call is (name in the tests, name in the program, arguments, keyword arguments).
    """
    module = ModuleType("program")
    peer = Peer(CHANNEL, opens=OPERATIONS, handle=FunctionProxy)
    loaded = _load(module, program, before=before, seeded=seeded)
    peer.send(loaded)
    functions: dict[str, Any] = {}
    for _, there, _, _ in calls if loaded[0] == "ready" else []:
        # Look the functions up once after the program has run, as tests would, before calls can change them.
        with suppress(Exception):
            functions[there] = getattr(module, there)
    for name, there, arguments, keywords in calls if loaded[0] == "ready" else []:
        peer.deliver([], partial(_tested, functions.get(there, MISSING), name, arguments, keywords))
    _leave()


def _tested(function: Any, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    if function is MISSING:
        raise NameError(f"name {name!r} is not defined")
    try:
        return function(*arguments, **keywords)
    except Exception as error:
        # Convert to text here, so that it costs the program's CPU time.
        error.args = (_text(error)[:MAX_TEXT],)
        raise


def _load(module: ModuleType, program: str, *, before: str, seeded: bool) -> list[str]:
    sys.modules[module.__name__] = module
    if seeded:
        import random

        random.seed(0)
    try:
        code = compile(program, "program.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        return ["failed", "compile", _line(error)]
    try:
        exec(compile(before, "before.py", "exec"), module.__dict__)  # noqa: S102 - in the confined process
        exec(code, module.__dict__)  # noqa: S102 - as above
    except BaseException as error:
        return ["failed", "run", _line(error)]
    return ["ready"]


def _function(module: ModuleType, name: str) -> Any:
    """A function of the program, or a method of a new instance of its class `Solution`."""
    if hasattr(module, name) or not hasattr(module, "Solution"):
        return getattr(module, name)
    return getattr(module.Solution(), name)


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {_text(error)}".splitlines()[0][:200]


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return ""


def _leave() -> None:
    """Ends the process at once, without exit handlers of the program."""
    os._exit(0)
