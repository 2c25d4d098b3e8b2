"""Programs with their tests, judged in the real sandbox: what the tests of the code judge share."""

from typing import Any

import pytest

from proximo.errors import SandboxError
from proximo.rewards.code.harness_source import PRELOAD
from proximo.rewards.code.judge import CodeJudge
from proximo.rewards.verdicts import Answer, Verdict
from proximo.sandbox.runner import Sandbox


def open_sandbox() -> Sandbox:
    try:
        return Sandbox(preload=PRELOAD)
    except SandboxError as error:
        pytest.skip(f"no sandbox here: {error}")


def judged(sandbox: Sandbox, text: str, metadata: dict[str, Any], prompt: Any = "", **options: Any) -> Verdict:
    """The verdict on a program that is the whole answer."""
    judge = CodeJudge(runner=sandbox, **{"program": "text", "form": "asserts"} | options)
    return judge.judge(Answer(text=text, prompt=prompt, metadata=metadata))
