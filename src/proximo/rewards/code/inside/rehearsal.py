"""What runs tests without a program, to find those that no program passes. Not the tests' grades: tests_process.py.

In the place of what a program defines, and of whatever that would return, there are stand-ins. They note what they are
compared with; a test that asks more of one ends there, and nothing is said of it.

Runs inside the sandbox: the standard library alone.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from proximo.rewards.code.inside.codec import Encoder, RefusedError
from proximo.rewards.code.inside.tests_process import Mute, Report


class UnknownError(BaseException):
    """What a program would have to answer. No `except Exception` of a test keeps it."""


class ForeignError(RefusedError):
    """A value of a class that is no plain one, whose name it says."""


class StandIn:
    """For any value: it equals everything, and differs from it."""

    def __init__(self, met: list[str]) -> None:
        """`met` gets the class of each value that it is compared with and that is no plain one."""
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
                Encoder([], _refer).tree(other)
            except ForeignError as error:
                self._met.append(str(error))
            except (RefusedError, RecursionError):
                pass
        return True

    def __ne__(self, other: object) -> bool:
        # From anything, and rightly so from what is no plain value.
        return True

    def __hash__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        raise UnknownError


def rehearse(
    word: str, *, before: str, modules: Sequence[str], names: Sequence[str], setup: str, tests: Sequence[str]
) -> None:
    """Reports `["import", where, module]` for the first import that fails, or `["compares", where, class]` for the
    first that a program could not return and that would have to equal what it returns; and then `["end"]`."""
    sys.stdout = sys.stderr = Mute()
    met: list[str] = []
    namespace: dict[str, Any] = {"__name__": "tests"}
    namespace.update({name: importlib.import_module(name) for name in modules})
    namespace.update({name: StandIn(met) for name in names})
    report = Report(word)
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
    """What the source imports and is not there; None where it fails for another reason, or not at all."""
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
