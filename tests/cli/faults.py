"""What the tests of faults share: a command that is refused, and the recipe that it reads."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from proximo.cli import main


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """What is said by a command that ends with an error. What it raises is a traceback at the command line."""
    capsys.readouterr()
    status = main(arguments)
    said = capsys.readouterr().err
    assert status in (1, 2), (arguments, said)
    (error,) = errors_in(said)
    assert "Traceback" not in said
    assert not error.rstrip().endswith(":"), f"no reason: {said}"
    return said


def errors_in(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("error: ")]


def recipe_file(recipe: dict[str, Any], path: Path) -> str:
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return str(path)
