"""Programs with their tests, graded in the real sandbox: what the tests of the code verifier share."""

from typing import Any

import pytest

from proximo.errors import SandboxError
from proximo.rewards.code.harness_source import PRELOAD
from proximo.rewards.code.verifier import CodeVerifier
from proximo.rewards.verifier import Answer, Grade
from proximo.sandbox.runner import Sandbox


def open_sandbox() -> Sandbox:
    try:
        return Sandbox(preload=PRELOAD)
    except SandboxError as error:
        pytest.skip(f"no sandbox here: {error}")


def graded(sandbox: Sandbox, text: str, metadata: dict[str, Any], prompt: Any = "", **options: Any) -> Grade:
    """The grade on a program that is the whole answer."""
    verifier = CodeVerifier(runner=sandbox, **{"program": "response", "form": "asserts"} | options)
    return verifier.grade(Answer(text=text, prompt=prompt, metadata=metadata))
