"""What the scripts of benchmarks/ and examples/ take from Proximo exists: most of them run by hand alone."""

import ast
import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("examples/**/*.py")))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_name_that_a_script_imports_from_the_package_exists(script: Path) -> None:
    imports = [node for node in ast.walk(ast.parse(script.read_text())) if isinstance(node, ast.ImportFrom)]
    for node in imports:
        name = node.module or ""
        if name.partition(".")[0] == "proximo":
            missing = [each.name for each in node.names if not has(importlib.import_module(name), each.name)]
            assert not missing, f"{script.name}:{node.lineno}: {name} has no {', '.join(missing)}"


def has(module: ModuleType, name: str) -> bool:
    """Whether a module has a name, or a module of that name below it."""
    below = hasattr(module, "__path__") and importlib.util.find_spec(f"{module.__name__}.{name}") is not None
    return below or hasattr(module, name)
