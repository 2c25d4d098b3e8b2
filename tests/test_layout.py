"""The tree of the sources: no folder is a hall. Which way imports go is held by import-linter (pyproject.toml)."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib.util import find_spec
from pathlib import Path
from pkgutil import walk_packages

import pytest

import proximo
import proximo_cpu
import proximo_cuda
import proximo_verifiers

SOURCE = Path(__file__).parents[1] / "src"
PACKAGES = (proximo, proximo_cpu, proximo_cuda, proximo_verifiers)
FOLDERS = [
    path
    for package in PACKAGES
    for path in (SOURCE / package.__name__, *(SOURCE / package.__name__).rglob("*"))
    if path.is_dir() and path.name != "__pycache__"
]


def test_no_folder_holds_more_than_twenty_files() -> None:
    full = {path: sum(entry.is_file() for entry in path.iterdir()) for path in FOLDERS}
    assert not {str(path.relative_to(SOURCE.parent)): count for path, count in full.items() if count > 20}


def test_every_folder_at_the_top_has_its_row_on_the_page() -> None:
    page = (SOURCE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    tops = [path.relative_to(SOURCE) for path in FOLDERS if path.parent.parent == SOURCE and path.name != "recipes"]
    assert not [path for path in tops if f"| `src/{path}/` |" not in page]


def test_the_drawing_of_the_layers_is_the_contract() -> None:
    page = (SOURCE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    drawing = page.split("## Layers")[1].split("```")[1].split("\n\n")[0].strip()
    lines = [re.split(r" {2,}", line)[0] for line in drawing.splitlines()]
    project = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text(encoding="utf-8"))
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"]
    assert [line.replace("/", "").replace(".py", "") for line in lines] == layers


def test_no_files_import_each_other_in_a_ring() -> None:
    """import-linter orders folders, and passes over types; here imports in functions and for type checkers count."""
    paths = (path for package in PACKAGES for path in (SOURCE / package.__name__).rglob("*.py"))
    files = {".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in paths}
    TopologicalSorter({name: set(imported(name)) & files for name in files}).prepare()  # a CycleError names the ring


ADAPTED = ("gem", "gymnasium", "reasoning_gym", "skyrl_gym", "textarena")
"""Packages that an adapter of the same name imports."""
FUSED = "proximo.rollout.fused_sampling"
EACH_ALONE = """
import importlib, os, sys, traceback
import datasets, matplotlib, peft, pydantic, torch.distributed.fsdp, transformers, typer
failed = []
for name in sys.argv[1:]:
    if os.fork() == 0:
        try:
            importlib.import_module(name)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    failed += [name] if os.wait()[1] else []
assert not failed, failed
"""
"""Imports each module in a process that has none of ours. Libraries, which have no ring with ours, are loaded once."""


@pytest.mark.parametrize("name", ["proximo.rollout.ranks_engine", "proximo.config.functions"])
def test_a_module_imports_alone(name: str) -> None:
    """Of those that take a module out of the package itself, which loads its public names when first asked for one."""
    subprocess.run([sys.executable, "-c", f"import {name}"], check=True)


@pytest.mark.soak
def test_every_module_imports_alone() -> None:
    walks = (walk_packages(package.__path__, f"{package.__name__}.") for package in PACKAGES)
    names = [module.name for walk in walks for module in walk if module.name != "proximo.__main__"]
    others = {f"proximo.environments.adapters.{name}": name for name in ADAPTED} | {FUSED: "triton"}
    names = [name for name in names if name not in others or find_spec(others[name])]
    subprocess.run([sys.executable, "-c", EACH_ALONE, *names], check=True)


def imported(name: str) -> Iterator[str]:
    """What a file imports anywhere in it, as modules, and as modules that are taken out of their folder by name."""
    path = SOURCE.joinpath(*name.split(".")).with_suffix(".py")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
