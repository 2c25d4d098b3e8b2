"""Reads the recipe that a run saved in its folder."""

import json
from pathlib import Path
from typing import Any

from proximo.checkpoint.run_folder import RESOLVED_CONFIG
from proximo.config.loader import read_saved
from proximo.config.recipe import TrainerRecipe
from proximo.errors import RunFolderError
from proximo.trainer_kinds import TrainerKind, recognise, trainer_kinds


def saved_recipe(run: Path) -> TrainerRecipe:
    """The saved recipe. Raises RunFolderError if it is missing or damaged."""
    saved = run / RESOLVED_CONFIG
    if not saved.is_file():
        raise RunFolderError(f"{run} has no file {RESOLVED_CONFIG}, so its models and data are not known")
    try:
        content = _with_moved_paths(json.loads(saved.read_text(encoding="utf-8")), run)
        kind = recognise(content)
    except (ValueError, TypeError, KeyError) as error:  # not JSON, or not a recipe
        reason = str(error).partition("\n")[0]
        raise RunFolderError(f"{saved} is damaged ({reason}): it cannot be read") from error
    if not isinstance(kind, TrainerKind):
        names = ", ".join(each.name for each in trainer_kinds())
        raise RunFolderError(f"{saved} is for a trainer that is not installed here; installed are {names}")
    return read_saved(kind.schema, content, saved_by=None)


def _with_moved_paths(content: Any, run: Path) -> Any:
    """Rewrite the paths of a stage whose pipeline was moved from the old folder to the new one."""
    before, now = Path(content["run"]["folder"]).parent, run.parent

    def moved(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: moved(part) for name, part in value.items()}
        if isinstance(value, list):
            return [moved(part) for part in value]
        if not isinstance(value, str) or not value.startswith(f"{before}/") or Path(value).exists():
            return value
        found = now / Path(value).relative_to(before)
        return str(found) if found.exists() else value

    return content if before == now else moved(content)
