"""Checks whether a run may start in its folder, and whether a new folder can be made. Imports no torch."""

import os
from pathlib import Path

from proximo.checkpoint.run_folder import Resume, check_run
from proximo.config.recipe import Recipe, TrainerRecipe
from proximo.errors import RunFolderError
from proximo.run.preflight import inputs_of


def check_folders(recipe: Recipe, *, resume: Resume, overwrite: bool) -> None:
    """Raises RunFolderError if `open_run` would refuse the folder, or if the run reads files that it would move."""
    if "" not in recipe.stages():
        # A later stage may have no run yet, so for stages `--resume` means "start or continue".
        resume = "never" if resume == "never" else "auto"
    for _, stage in recipe.given_stages():
        folder = Path(stage.run.folder)
        check_run(folder, resume=resume, overwrite=overwrite)
        if overwrite:
            _refuse_own_inputs(stage, folder)


def check_new_folder(out: Path) -> None:
    """Raises RunFolderError if no folder can be made at `out`."""
    if out.exists():
        raise RunFolderError(f"{out} exists and is left as it is: give a folder that does not exist yet")
    if file := next((parent for parent in out.parents if parent.exists() and not parent.is_dir()), None):
        raise RunFolderError(f"{file} is a file, so that there can be no folder {out}: give another one")
    above = next(parent for parent in out.absolute().parents if parent.exists())
    if not os.access(above, os.W_OK | os.X_OK):
        raise RunFolderError(f"the folder {out} cannot be written: the permissions of {above} refuse it")


def _refuse_own_inputs(recipe: TrainerRecipe, folder: Path) -> None:
    """Raises RunFolderError if the run reads files from `folder`: moved aside, they would be missing on resume."""
    for each in inputs_of(recipe):
        if each.kind in ("folder", "file") and folder.resolve() in Path(each.name).expanduser().resolve().parents:
            raise RunFolderError(
                f"{each.key} is {each.name}, in the folder {folder} that --overwrite would move aside: give "
                "run.folder another name"
            )
