"""What `--dry-run` prints: a preview of a recipe, and warnings about problems that files of this machine show.

Loads no model, writes no file and imports no torch.
"""

from collections.abc import Iterator

from proximo.config.recipe import Recipe, TrainerRecipe
from proximo.run.dry_run import rank_lines, run_lines, thread_problem, untrained_rows
from proximo.trainer_kinds import trainer_of

NAME_WIDTH = 12


def describe(recipe: Recipe) -> str:
    """One line for each model, data set and quantity."""
    return "\n".join(_lines(recipe))


def _lines(recipe: Recipe) -> Iterator[str]:
    stages = recipe.stages()
    if "" not in stages:
        yield f"pipeline in {recipe.run.folder}"
    for name, stage in stages.items():
        if name:
            yield f"\nstage {name}" + ("" if stage is not None else ": left out")
        if stage is not None:
            yield from _stage_lines(stage)


def _stage_lines(recipe: TrainerRecipe) -> Iterator[str]:
    for name, text in (*run_lines(recipe.run), *rank_lines(recipe), *trainer_of(recipe).dry_run(recipe)):
        yield f"  {name:<{NAME_WIDTH}} {text}"


def find_warnings(recipe: Recipe) -> Iterator[str]:
    """Warnings about problems that may end the run."""
    for prefix, stage in recipe.given_stages():
        if threads := thread_problem(stage.run):
            yield f"{prefix}{threads}"
        yield from (f"{prefix}{each}" for each in untrained_rows(stage))
