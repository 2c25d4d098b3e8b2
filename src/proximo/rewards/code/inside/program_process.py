"""What runs in the program's process: the program itself, and then whatever it is called for. No expected value.

Everything in this process belongs to the program, which may read and change it. What it can reach by that is what
it could have answered anyway.

Runs inside the sandbox: the standard library alone.
"""

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import Any

from proximo.rewards.code.inside.proxies import Handle
from proximo.rewards.code.inside.rpc_peer import MAX_TEXT, Peer

CHANNEL = 3
"""The descriptor to the verifier."""
DOES = ("call", "get", "set", "operator")
MISSING = object()


def serve(program: str, *, before: str, seeded: bool) -> None:
    """Runs the program, says how that went, and answers calls of what it defined until the verifier is gone."""
    module = ModuleType("program")
    peer = Peer(CHANNEL, opens=DOES, handle=Handle, roots=[module])
    peer.send(_load(module, program, before=before, seeded=seeded))
    peer.serve()
    _leave()


def call_each(program: str, name: str, calls: str, *, before: str, seeded: bool) -> None:
    """Runs the program, calls one function of it with each list of arguments in the JSON of `calls`, and writes what it
    returned."""
    module = ModuleType("program")
    peer = Peer(CHANNEL, opens=(), handle=Handle)
    loaded = _load(module, program, before=before, seeded=seeded)
    peer.send(loaded)
    for arguments in json.loads(calls) if loaded[0] == "ready" else []:
        peer.deliver([], lambda given=arguments: _function(module, name)(*given))
    _leave()


def call_as_tested(
    program: str, calls: Sequence[tuple[str, str, tuple[Any, ...], dict[str, Any]]], *, before: str, seeded: bool
) -> None:
    """Runs the program, makes each of `calls` (name in the tests, name in the program, arguments) and writes what it
    returned, or what was raised with its text."""
    module = ModuleType("program")
    peer = Peer(CHANNEL, opens=DOES, handle=Handle)
    loaded = _load(module, program, before=before, seeded=seeded)
    peer.send(loaded)
    functions: dict[str, Any] = {}
    for _, there, _, _ in calls if loaded[0] == "ready" else []:
        # As tests have them: what the program defines when it has run, whatever its functions change later.
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
        # Made here, where it costs the program's own time.
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
        exec(compile(before, "before.py", "exec"), module.__dict__)  # noqa: S102 - in the program's own process
        exec(code, module.__dict__)  # noqa: S102 - as above
    except BaseException as error:
        return ["failed", "run", _line(error)]
    return ["ready"]


def _function(module: ModuleType, name: str) -> Any:
    """A function of the program, or a method of its class `Solution`, made anew for each call."""
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
    """Ends the process here, whatever the program left to be done at its end."""
    os._exit(0)
