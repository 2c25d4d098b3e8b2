"""The text of both programs: one call of what the sandbox has preloaded. Not how they are run."""

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

INSIDE: Final = "proximo.rewards.code.inside"
PRELOAD: Final = (f"{INSIDE}.program_side", f"{INSIDE}.judge_side")
"""What the sandbox has to have loaded: in it nothing of this package can be read."""
RANDOM: Final = re.compile(r"\brandom\b")


def program_that_serves(program: str, *, before: str, seeded: bool) -> str:
    """Runs `before` and the program, and answers calls of its functions on descriptor 3."""
    return _call("program_side", "serve", [program], before=before, seeded=seeded)


def program_that_calls(program: str, name: str, calls: Sequence[Any], *, before: str, seeded: bool) -> str:
    """Runs `before` and the program, calls one of its functions with each of `calls`, and writes to descriptor 3."""
    return _call("program_side", "call_each", [program, name, json.dumps(calls)], before=before, seeded=seeded)


def tests_that_judge(word: str, **facts: Any) -> str:
    """Runs tests against the program behind descriptor 3, and writes verdicts that begin with `word`."""
    return _call("judge_side", "run_tests", [word], **facts)


def uses_random(source: str) -> bool:
    """The generator of such a program starts from a fixed seed, so that one program has one verdict."""
    return RANDOM.search(source) is not None


def _call(module: str, function: str, arguments: Iterable[Any], **keywords: Any) -> str:
    given = ", ".join([*map(repr, arguments), *(f"{name}={value!r}" for name, value in keywords.items())])
    return f"from {INSIDE}.{module} import {function}\n{function}({given})\n"
