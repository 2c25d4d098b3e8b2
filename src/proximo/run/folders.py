"""Checks whether a run may start in its folder; checkpoint/run_folder.py opens it. Imports no torch."""

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


def _refuse_own_inputs(recipe: TrainerRecipe, folder: Path) -> None:
    """A run that starts from a model that it overwrites would lose that model and could not be resumed."""
    for each in inputs_of(recipe):
        below = Path(each.name).expanduser().resolve()
        if each.kind in ("folder", "file") and any((folder / name).resolve() in below.parents for name in REPLACED):
            raise RunFolderError(
                f"{each.key} is {each.name}, which belongs to the run in {folder} that --overwrite would remove: give "
                "run.folder another name"
            )
