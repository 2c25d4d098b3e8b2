"""Whether this machine can give every guarantee; tests that need them all ask for it."""

import pytest

from proximo_verifiers.errors import SandboxError
from proximo_verifiers.sandbox.runner import Sandbox


@pytest.fixture(scope="session")
def whole_sandbox() -> None:
    """Skips, with the reason, where a guarantee is missing."""
    try:
        Sandbox().close()
    except SandboxError as error:
        pytest.skip(str(error))
