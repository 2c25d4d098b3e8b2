"""Runs all checks of a recipe that need no model and no data set. Importing it is fast."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from proximo.errors import ConfigError

if TYPE_CHECKING:  # importing the schemas would slow down --help
    from proximo.config.loader import LoadedRecipe
    from proximo.config.recipe import Recipe
    from proximo.config.schema.positioned_yaml import Document
    from proximo.run.options import RunOptions


def checked(kind: str, recipe: "str | Document", overrides: Sequence[str], *, quiet: bool = False) -> "LoadedRecipe":
    """Load a recipe and run all checks that need no model and no data set.

    Prints notes about ineffective keys, unless `quiet`.
    """
    from proximo.config.ineffective_keys import ineffective_keys
    from proximo.config.loader import load_recipe
    from proximo.run.preflight import check_inputs

    loaded = load_recipe(kind, recipe, overrides)
    check_inputs(loaded.recipe)
    for sentence in () if quiet else ineffective_keys(loaded.recipe):
        print(f"note: {sentence}", file=sys.stderr)
    return loaded


def check_start(recipe: "Recipe", options: "RunOptions") -> None:
    """Raises ConfigError for a missing device or a push that cannot work.

    RunFolderError for a folder that holds another run.
    """
    from proximo.commands.dry_run import device_problem
    from proximo.run.preflight import check_folders, check_push

    if problem := device_problem(recipe.run.device):
        raise ConfigError(f"run.device is {recipe.run.device}, but {problem}: use auto or cpu")
    for _, stage in recipe.given_stages():
        check_push(stage)
    check_folders(recipe, resume=options.resume, overwrite=options.overwrite)
