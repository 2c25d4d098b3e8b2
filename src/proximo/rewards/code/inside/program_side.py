"""What runs in the program's process: the program itself, and then whatever it is called for. No expected value.

Everything in this process belongs to the program, which may read and change it. What it can reach by that is what
it could have answered anyway.

Runs inside the sandbox: the standard library alone.
"""

import json
import os
import sys
from types import ModuleType
from typing import Any

from proximo.rewards.code.inside.handles import Handle
from proximo.rewards.code.inside.peer import Peer

CHANNEL = 3
"""The descriptor to the judge."""
DOES = ("call", "get", "set", "operator")


def serve(program: str, *, before: str, seeded: bool) -> None:
    """Runs the program, says how that went, and answers calls of what it defined until the judge is gone."""
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
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = type(error).__name__
    return text.splitlines()[0][:200]


def _leave() -> None:
    """Ends the process here, whatever the program left to be done at its end."""
    os._exit(0)
