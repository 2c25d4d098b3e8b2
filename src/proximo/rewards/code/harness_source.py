"""The text of both programs: one call of what the sandbox has preloaded. Not how they are run."""

import json
import re
from collections.abc import Sequence
from typing import Any, Final

from proximo.rewards.code.parsed_asserts import Comparison

INSIDE: Final = "proximo.rewards.code.inside"
PRELOAD: Final = (f"{INSIDE}.program_process", f"{INSIDE}.tests_process", f"{INSIDE}.rehearsal")
"""What the sandbox has to have loaded: in it nothing of this package can be read."""
RANDOM: Final = re.compile(r"\brandom\b")


def program_that_serves(program: str, *, before: str, seeded: bool) -> str:
    """Runs `before` and the program, and answers calls of its functions on descriptor 3."""
    return _call("program_process", "serve", repr(program), before=before, seeded=seeded)


def program_that_calls(program: str, name: str, calls: Sequence[Any], *, before: str, seeded: bool) -> str:
    """Runs `before` and the program, calls one of its functions with each of `calls`, and writes to descriptor 3."""
    given = map(repr, (program, name, json.dumps(calls)))
    return _call("program_process", "call_each", *given, before=before, seeded=seeded)


def program_that_is_tested(program: str, tests: Sequence[Comparison], *, before: str, seeded: bool) -> str:
    """As above for the calls of `tests`. Nothing else of them is in it: neither what they expect nor their messages."""
    calls = "".join(f"({test.name!r}, {test.function!r}, {test.arguments}), " for test in tests)
    return _call("program_process", "call_as_tested", repr(program), f"[{calls}]", before=before, seeded=seeded)


def tests_that_verifier(word: str, **facts: Any) -> str:
    """Runs tests against the program behind descriptor 3, and writes lines that begin with `word`."""
    return _call("tests_process", "run_tests", repr(word), **facts)


def tests_that_are_rehearsed(word: str, **facts: Any) -> str:
    """Runs tests without a program, and writes what is wrong with them in lines that begin with `word`."""
    return _call("rehearsal", "rehearse", repr(word), **facts)


def uses_random(source: str) -> bool:
    """The generator of such a program starts from a fixed seed, so that one program has one grade."""
    return RANDOM.search(source) is not None


def _call(module: str, function: str, *arguments: str, **keywords: Any) -> str:
    """`arguments` are Python, `keywords` values."""
    given = ", ".join([*arguments, *(f"{name}={value!r}" for name, value in keywords.items())])
    return f"from {INSIDE}.{module} import {function}\n{function}({given})\n"
