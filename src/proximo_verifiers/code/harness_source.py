"""The Python source of the programs that run in the sandbox: each is one call of a preloaded harness function."""

import json
import re
from collections.abc import Sequence
from typing import Any, Final

from proximo_verifiers.code.parsed_asserts import ParsedAssert

INSIDE: Final = "proximo_verifiers.code.inside"
PRELOAD: Final = (f"{INSIDE}.program_process", f"{INSIDE}.tests_process", f"{INSIDE}.rehearsal")
"""Modules that the sandbox preloads, because programs cannot read the files of this package."""
RANDOM: Final = re.compile(r"\brandom\b")


def serving_source(program: str, *, before: str, seeded: bool) -> str:
    """Source that runs `before` and the program, and answers calls of its functions on descriptor 3."""
    return _call("program_process", "serve", repr(program), before=before, seeded=seeded)


def calling_source(program: str, name: str, calls: Sequence[Any], *, before: str, seeded: bool) -> str:
    """Source that runs `before` and the program, calls a function with each of `calls`, and writes to descriptor 3."""
    parameters = map(repr, (program, name, json.dumps(calls)))
    return _call("program_process", "call_each", *parameters, before=before, seeded=seeded)


def tested_source(program: str, tests: Sequence[ParsedAssert], *, before: str, seeded: bool) -> str:
    """Source that runs `before` and the program, and makes the calls of `tests`.

    It contains neither the expected values nor the messages of the tests.
    """
    calls = "".join(f"({test.name!r}, {test.function!r}, {test.arguments}), " for test in tests)
    return _call("program_process", "call_as_tested", repr(program), f"[{calls}]", before=before, seeded=seeded)


def tests_source(word: str, **facts: Any) -> str:
    """Source that runs tests against the program behind descriptor 3, and prints results in lines that begin with
    `word`."""
    return _call("tests_process", "run_tests", repr(word), **facts)


def rehearsal_source(word: str, **facts: Any) -> str:
    """Source that runs tests without a program, and prints their problems in lines that begin with `word`."""
    return _call("rehearsal", "rehearse", repr(word), **facts)


def uses_random(source: str) -> bool:
    """True if the source mentions `random`; its generator is then seeded, so that a program has one grade."""
    return RANDOM.search(source) is not None


def _call(module: str, function: str, *arguments: str, **keywords: Any) -> str:
    """`arguments` are Python source, `keywords` are values."""
    parameters = ", ".join([*arguments, *(f"{name}={value!r}" for name, value in keywords.items())])
    return f"from {INSIDE}.{module} import {function}\n{function}({parameters})\n"
