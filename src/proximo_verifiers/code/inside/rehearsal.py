"""Runs tests without a program, to find tests that no program can pass.

Stand-ins replace the functions of a program and their results, and record the values that they are compared with. A
test that needs more of a stand-in ends there, and nothing is reported about it.

Runs inside the sandbox, so it may import the standard library only.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from proximo_verifiers.code.inside.codec import ValueEncoder, ValueRefusedError
from proximo_verifiers.code.inside.tests_process import Mute, ResultWriter


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
