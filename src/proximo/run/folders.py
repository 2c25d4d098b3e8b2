"""Whether a recipe's run may begin in its folder. Not the opening of it (`run_folder.py`). Imports no torch."""

from pathlib import Path

from proximo.checkpoint.run_folder import REPLACED, Resume, check_run
from proximo.config.recipe import Recipe, TrainerRecipe
from proximo.errors import RunFolderError
from proximo.run.preflight import inputs_of


def check_folders(recipe: Recipe, *, resume: Resume, overwrite: bool) -> None:
    """Raises RunFolderError where `open_run` would refuse a folder, or the run reads what it would replace."""
    if "" not in recipe.stages():
        # A stage that was not reached yet has no run to resume: for stages, resume means "start or go on".
        resume = "never" if resume == "never" else "auto"
    for _, stage in recipe.given_stages():
        folder = Path(stage.run.folder)
        check_run(folder, resume=resume, overwrite=overwrite)
        if overwrite:
            _refuse_own_inputs(stage, folder)


def _refuse_own_inputs(recipe: TrainerRecipe, folder: Path) -> None:
    """A run that starts from what it replaces could not be resumed, and would lose it."""
    for each in inputs_of(recipe):
        below = Path(each.name).expanduser().resolve()
        if each.kind in ("folder", "file") and any((folder / name).resolve() in below.parents for name in REPLACED):
            raise RunFolderError(
                f"{each.key} is {each.name}, which belongs to the run in {folder} that --overwrite would remove: give "
                "run.folder another name"
            )
