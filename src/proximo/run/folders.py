"""Checks whether a run may start in its folder, and a model be written to a new one. Imports no torch."""

import os
from pathlib import Path

from proximo.checkpoint.run_folder import REPLACED, Resume, check_run
from proximo.config.recipe import Recipe, TrainerRecipe
from proximo.errors import RunFolderError
from proximo.run.preflight import inputs_of


def check_folders(recipe: Recipe, *, resume: Resume, overwrite: bool) -> None:
    """Raises RunFolderError if `open_run` would refuse the folder, or if the run reads files that it would replace."""
    if "" not in recipe.stages():
        # A later stage may have no run yet, so for stages `--resume` means "start or continue".
        resume = "never" if resume == "never" else "auto"
    for _, stage in recipe.given_stages():
        folder = Path(stage.run.folder)
        check_run(folder, resume=resume, overwrite=overwrite)
        if overwrite:
            _refuse_own_inputs(stage, folder)


def check_new_folder(out: Path) -> None:
    """Raises RunFolderError where no folder can be made at `out`."""
    if out.exists():
        raise RunFolderError(f"{out} exists and is left as it is: give a folder that does not exist yet")
    if file := next((parent for parent in out.parents if parent.exists() and not parent.is_dir()), None):
        raise RunFolderError(f"{file} is a file, so that there can be no folder {out}: give another one")
    above = next(parent for parent in out.absolute().parents if parent.exists())
    if not os.access(above, os.W_OK | os.X_OK):
        raise RunFolderError(f"the folder {out} cannot be written: the permissions of {above} refuse it")


def _refuse_own_inputs(recipe: TrainerRecipe, folder: Path) -> None:
    """A run that starts from a model that it overwrites would lose that model and could not be resumed."""
    for each in inputs_of(recipe):
        below = Path(each.name).expanduser().resolve()
        if each.kind in ("folder", "file") and any((folder / name).resolve() in below.parents for name in REPLACED):
            raise RunFolderError(
                f"{each.key} is {each.name}, which belongs to the run in {folder} that --overwrite would remove: give "
                "run.folder another name"
            )
