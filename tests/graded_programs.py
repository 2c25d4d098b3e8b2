"""Programs with their tests, graded in the real sandbox: what the tests of the code verifier share."""

from typing import Any

import pytest

from proximo_verifiers.code.test_runner import PRELOAD
from proximo_verifiers.code.verifier import CodeVerifier
from proximo_verifiers.errors import SandboxError
from proximo_verifiers.sandbox.runner import Sandbox
from proximo_verifiers.verifier import Answer, Grade


def open_sandbox() -> Sandbox:
    try:
        return Sandbox(preload=PRELOAD)
    except SandboxError as error:
        pytest.skip(f"no sandbox here: {error}")


def graded(sandbox: Sandbox, text: str, metadata: dict[str, Any], prompt: Any = "", **options: Any) -> Grade:
    """The grade on a program that is the whole answer."""
    verifier = CodeVerifier(runner=sandbox, **{"program": "response", "form": "asserts"} | options)
    return verifier.grade(Answer(text=text, prompt=prompt, metadata=metadata))
