"""The process that runs the tests, with proxies for the functions of the program, or without a program at all.

It prints the result of each test in lines that begin with a secret word, which only the worker and this process know.
The program's process shares no descriptor with this one but the socket. A rehearsal without a program finds tests that
no program can pass: stand-ins replace its functions and their results, and record the values that they are compared
with. A test that needs more of a stand-in ends there, and nothing is reported about it.

Runs inside the sandbox, so it may import the standard library only.
"""

import importlib
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from proximo_verifiers.code.inside.codec import TooLargeError, ValueEncoder, ValueRefusedError
from proximo_verifiers.code.inside.rpc_peer import BROKE, ClosedError, Peer, ProgramProxy

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


class UnknownError(BaseException):
    """The test needs a real result. Not an Exception, so that no `except Exception` of a test catches it."""


class ForeignError(ValueRefusedError):
    """A value of a class that cannot be encoded. The message is the name of the class."""


class StandIn:
    """Stands in for any value: it both equals and differs from everything."""

    def __init__(self, met: list[str]) -> None:
        """`met` collects the class names of compared values that are not plain values."""
        self._met = met

    def __call__(self, *_: Any, **__: Any) -> "StandIn":
        return StandIn(self._met)

    def __getattr__(self, name: str) -> "StandIn":
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(self._met)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StandIn):
            try:
                ValueEncoder([], _refer).tree(other)
            except ForeignError as error:
                self._met.append(str(error))
            except (ValueRefusedError, RecursionError):
                pass
        return True

    def __ne__(self, other: object) -> bool:
        # True as well, so that the test goes on.
        return True

    def __hash__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        raise UnknownError


def rehearse(
    word: str, *, before: str, modules: Sequence[str], names: Sequence[str], setup: str, tests: Sequence[str]
) -> None:
    """Runs the tests with stand-ins and prints the first problem, then `["end"]`.

    A problem is `["import", where, module]` for a failed import, or `["compares", where, class]` for a comparison of a
    result with a value that no program can return.
    """
    sys.stdout = sys.stderr = Mute()
    met: list[str] = []
    namespace: dict[str, Any] = {"__name__": "tests"}
    namespace.update({name: importlib.import_module(name) for name in modules})
    namespace.update({name: StandIn(met) for name in names})
    report = ResultWriter(word)
    pieces = [("the code before the program", before, {}), ("the set-up of the tests", setup, namespace)]
    pieces += [(f"test {number + 1}", test, namespace) for number, test in enumerate(tests)]
    for where, source, variables in pieces:
        missing = _missing(source, variables)
        if missing is not None:
            report.write("import", where, missing)
        elif met:
            report.write("compares", where, met[0])
        if missing is not None or met:
            break
    report.write("end")
    os._exit(0)


def _missing(source: str, variables: dict[str, Any]) -> str | None:
    """The module whose import fails; None if the source fails for another reason or not at all."""
    try:
        exec(compile(source, "<rehearsal>", "exec"), variables)  # noqa: S102 - code of the data set, in a sandbox
    except ImportError as error:
        return error.name or str(error)
    except BaseException:
        return None
    return None


def _refer(value: Any) -> list[Any]:
    if isinstance(value, StandIn):
        return ["o", 0]
    raise ForeignError(type(value).__name__)
