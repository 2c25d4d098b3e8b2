"""What runs in the verifier's process: the tests, with stand-ins for what the program defines. Not the program.

Says on its standard output what became of each test, in lines that begin with a word that only the trainer's side and
this process know. The program's process has no descriptor of this one but the socket, on which values cross.

Runs inside the sandbox: the standard library alone.
"""

import importlib
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from proximo.rewards.code.inside.codec import RefusedError, TooLargeError
from proximo.rewards.code.inside.proxies import ProgramProxy
from proximo.rewards.code.inside.rpc_peer import BROKE, ClosedError, Peer

CHANNEL = 3
"""The descriptor to the program's process."""
MAX_LINE = 200


class Mute:
    """Takes the place of standard output, so that a test that prints writes nothing between the grades."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        return


class Report:
    """Lines of grades."""

    def __init__(self, word: str) -> None:
        self._word = word

    def write(self, *facts: Any) -> None:
        data = f"{self._word} {json.dumps(facts)}\n".encode("ascii")
        while data:
            data = data[os.write(1, data) :]


def run_tests(
    word: str,
    *,
    modules: Sequence[str],
    names: Sequence[tuple[str, str]],
    setup: str,
    tests: Sequence[str],
    seeded: bool,
) -> None:
    """Reports `["program", how, why]` where the program itself failed, `["setup", what, why]` where the set-up did,
    else `[what, number, why]` for each test.

    `what` is `pass`, `fail` (the program's fault) or `broken` (the tests' own). `names` are pairs (name in the tests,
    name in the program). The last line is `["end"]`.
    """
    sys.stdout = sys.stderr = Mute()
    report = Report(word)
    peer = Peer(CHANNEL, opens=("call",), handle=ProgramProxy)
    try:
        greeting = peer.receive()
    except ClosedError as closed:
        greeting = ["failed", "run", str(closed)]
    if greeting != ["ready"]:
        facts = greeting[1:] if [type(each) for each in greeting[1:]] == [str, str] else ["run", BROKE]
        report.write("program", *[each[:MAX_LINE] for each in facts])
    else:
        namespace = _namespace(peer, modules, names, seeded=seeded)
        prepared = _run(peer, namespace, setup, "set-up")
        if prepared is not None and peer.closed is None:
            report.write("setup", *prepared)
            tests = ()
        for number, test in enumerate(tests):
            found = _run(peer, namespace, test, f"test {number + 1}")
            report.write(*((found[0], number, found[1]) if found else ("pass", number, "")))
    report.write("end")
    os._exit(0)


def _namespace(peer: Peer, modules: Sequence[str], names: Sequence[tuple[str, str]], *, seeded: bool) -> dict[str, Any]:
    """What the tests start from: modules, and a handle or value for each name that the program has."""
    namespace: dict[str, Any] = {"__name__": "tests"}
    namespace.update({name: importlib.import_module(name) for name in modules})
    if seeded:
        importlib.import_module("random").seed(0)
    program = peer.root(0)
    for here, there in names:
        # A name that the program lacks raises NameError where the tests use it.
        with suppress(Exception):
            namespace[here] = peer.ask(program, "get", there)
    return namespace


def _run(peer: Peer, namespace: dict[str, Any], source: str, title: str) -> tuple[str, str] | None:
    """What is wrong, as (whose fault, why), or None where all passed."""
    peer.refused = None
    try:
        exec(compile(source, f"<{title}>", "exec"), namespace)  # noqa: S102 - tests of the data set, in a sandbox
    except (RefusedError, ImportError) as error:
        # What is too large to be given may be what the program returned, or made of it.
        by_program = peer.raised is error or (isinstance(error, TooLargeError) and peer.heard)
        found = ("fail" if by_program else "broken", _line(error))
    except (Exception, SystemExit) as error:
        found = ("fail", _line(error))
    else:
        found = None
    # What passed in spite of this was hidden by the test's own `except`.
    hidden = peer.closed or peer.refused
    return ("fail", hidden) if hidden else found


def _line(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:
        # Its arguments are the program's: one may fail to say what it is, or end the program.
        text = ""
    return (type(error).__name__ + (f": {text}" if text else "")).splitlines()[0][:MAX_LINE]
