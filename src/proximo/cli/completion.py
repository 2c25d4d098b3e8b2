"""What the shell offers after a command: recipes, run folders, checkpoints. typer asks for it at each press of Tab."""

import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import typer

from proximo.config.shipped import shipped_recipes
from proximo.trainer_kinds import trainer_kinds

RECIPE_ENDINGS = (".yaml", ".yml")
DEPTH = 3
"""Run folders are looked for this far below what was typed: `runs/demo/ppo` is three deep."""
MOST_FOLDERS = 2000
"""Folders looked at, so that Tab answers at once in a large tree."""


def shipped_names(incomplete: str) -> list[tuple[str, str]]:
    """Names of shipped recipes that begin so, with what each is for."""
    return [(recipe.name, recipe.summary) for recipe in shipped_recipes() if recipe.name.startswith(incomplete)]


def recipes(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Shipped recipes of the command, then recipe files below what was typed."""
    commands = {recipe.command for recipe in shipped_recipes()}
    shipped = [
        (name, summary)
        for name, summary in shipped_names(incomplete)
        if context.info_name not in commands or summary.partition(":")[0] == context.info_name
    ]
    files = [folder / name for folder, names in _below(incomplete) for name in sorted(names)]
    own = _as_typed([file for file in files if file.suffix in RECIPE_ENDINGS], incomplete)
    return shipped + [(path, "") for path in own]


def trained(incomplete: str) -> list[str]:
    """What `proximo init --train` takes."""
    from proximo.commands.starter_recipe import trained as choices  # would slow down --help

    return [name for name in choices() if name.startswith(incomplete)]


def run_folders(incomplete: str) -> list[str]:
    """Folders with a run, or with the runs of a pipeline's stages, below what was typed."""
    from proximo.checkpoint.run_folder import MARKER, RESOLVED_CONFIG  # would slow down --help

    found = [folder for folder, names in _below(incomplete) if MARKER in names or RESOLVED_CONFIG in names]
    stages = {kind.name for kind in trainer_kinds()}
    pipelines = {folder.parent for folder in found if folder.name in stages}
    return _as_typed(sorted({*found, *pipelines}), incomplete)


def checkpoints(context: typer.Context, incomplete: str) -> list[str]:
    """`latest`, `best` and the steps of the run that was named before the option."""
    from proximo.checkpoint.run_folder import CHECKPOINTS

    steps = [path.name for run in context.args[:1] for path in Path(run, CHECKPOINTS).glob("step-*")]
    return [name for name in ("latest", "best", *sorted(steps)) if name.startswith(incomplete)]


def _as_typed(paths: Iterable[Path], incomplete: str) -> list[str]:
    """The paths that begin like the typed text, which may begin with `./`."""
    here = "./" if incomplete.startswith("./") else ""
    return [text for text in (f"{here}{path}" for path in paths) if text.startswith(incomplete)]


def _below(incomplete: str) -> Iterator[tuple[Path, list[str]]]:
    """Each folder at or below that of the typed text, with the names of its files; not in what is in a run."""
    start = Path(incomplete) if incomplete.endswith("/") else Path(incomplete).parent
    for name, folders, files in islice(os.walk(start), MOST_FOLDERS):
        folder = Path(name)
        deep = len(folder.parts) - len(start.parts) >= DEPTH
        folders[:] = [] if deep else sorted(each for each in folders if not each.startswith(".") and each not in LEAVES)
        yield folder, files


LEAVES = frozenset({"checkpoints", "tensorboard", "node_modules", "__pycache__"})
"""Folders in which nobody keeps recipes or runs."""
