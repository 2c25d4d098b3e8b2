"""The process that runs the tests, with proxies for the functions of the program.

It prints the result of each test in lines that begin with a secret word, which only the worker and this process know.
The program's process shares no descriptor with this one but the socket.

Runs inside the sandbox, so it may import the standard library only.
"""

import importlib
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from proximo_verifiers.code.inside.codec import TooLargeError, ValueRefusedError
from proximo_verifiers.code.inside.proxies import ProgramProxy
from proximo_verifiers.code.inside.rpc_peer import BROKE, ClosedError, Peer

CHANNEL = 3
"""The descriptor to the program's process."""
MAX_LINE = 200


class Mute:
    """Replaces standard output, so that a test that prints writes nothing between the results."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        return


class ResultWriter:
    """Prints results as lines that begin with the secret word."""

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
    """Runs the tests and prints their results, then `["end"]`.

    A result is `["program", how, why]` if the program itself failed, `["setup", what, why]` if the set-up failed, else
    `[what, number, why]` for each test. `what` is `pass`, `fail` (the program is at fault) or `broken` (the test is).
    `names` are pairs (name in the tests, name in the program).
    """
    sys.stdout = sys.stderr = Mute()
    report = ResultWriter(word)
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
            failure = _run(peer, namespace, test, f"test {number + 1}")
            report.write(*((failure[0], number, failure[1]) if failure else ("pass", number, "")))
    report.write("end")
    os._exit(0)


def _namespace(peer: Peer, modules: Sequence[str], names: Sequence[tuple[str, str]], *, seeded: bool) -> dict[str, Any]:
    """The namespace of the tests: modules, and a proxy or value for each name of the program."""
    namespace: dict[str, Any] = {"__name__": "tests"}
    namespace.update({name: importlib.import_module(name) for name in modules})
    if seeded:
        importlib.import_module("random").seed(0)
    program = peer.root(0)
    for here, there in names:
        # A name that the program lacks stays undefined, so the tests raise NameError where they use it.
        with suppress(Exception):
            namespace[here] = peer.ask(program, "get", there)
    return namespace


def _run(peer: Peer, namespace: dict[str, Any], source: str, title: str) -> tuple[str, str] | None:
    """Runs a piece of the tests. Returns (`fail` or `broken`, reason), or None if it passed."""
    peer.refused = None
    try:
        exec(compile(source, f"<{title}>", "exec"), namespace)  # noqa: S102 - tests of the data set, confined by the sandbox
    except (ValueRefusedError, ImportError) as error:
        # An argument that is too large may be, or contain, a value that the program returned.
        by_program = peer.raised is error or (isinstance(error, TooLargeError) and peer.heard)
        failure = ("fail" if by_program else "broken", _line(error))
    except (Exception, SystemExit) as error:
        failure = ("fail", _line(error))
    else:
        failure = None
    # A closed channel or a refused value fails the test, even if an `except` of the test swallowed the exception.
    hidden = peer.closed or peer.refused
    return ("fail", hidden) if hidden else failure


def _line(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:
        # The arguments of the exception come from the program, so converting them to text may fail.
        text = ""
    return (type(error).__name__ + (f": {text}" if text else "")).splitlines()[0][:MAX_LINE]
