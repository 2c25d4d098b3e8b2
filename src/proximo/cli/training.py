"""The training commands, one per registered trainer, and `proximo pipeline`."""

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from proximo.cli.arguments import Overrides, RecipeName, loading
from proximo.cli.ranks import check_ranks, note_idle_tasks, run_rank
from proximo.commands.checked_recipe import check_start, checked
from proximo.distributed.rank_environment import LAUNCHED, find_place
from proximo.run.options import RunOptions
from proximo.trainer_kinds import recipe_kinds
from proximo.user_code import functions_of_the_working_directory

if TYPE_CHECKING:  # importing the schemas would slow down --help
    from proximo.config.recipe import Recipe

DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check the recipe and print a preview; load no model, write nothing.")
]
Resume = Annotated[
    Literal["never", "must", "auto"],
    typer.Option(
        "--resume",
        metavar="[=auto]",
        show_default=False,
        help="Resume the run in the folder; =auto also starts a new run, and does nothing if the run is finished.",
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Start in a folder that holds a run, which is moved aside.")
]
OtherEnvironment = Annotated[
    bool,
    typer.Option(
        "--allow-different-environment",
        help="Resume despite other versions, processor, or numbers of threads or ranks; the last bits may differ.",
    ),
]
ChangedRewards = Annotated[
    bool,
    typer.Option(
        "--allow-changed-rewards",
        help="Resume with reward functions, verifiers or reward settings that changed; they score the steps to come.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print warnings and errors only.")]


def add_to(app: typer.Typer) -> None:
    """Add a command for each registered kind of recipe that has none yet."""
    existing = {command.name for command in app.registered_commands}
    for kind in recipe_kinds():
        if kind.name not in existing:
            app.command(name=kind.name, help=kind.help)(_command(kind.name))


def _command(kind: str) -> Callable[..., int]:
    def command(
        context: typer.Context,
        recipe: RecipeName,
        overrides: Overrides = None,
        *,
        dry_run: DryRun = False,
        resume: Resume = "never",
        overwrite: Overwrite = False,
        allow_different_environment: OtherEnvironment = False,
        allow_changed_rewards: ChangedRewards = False,
        quiet: Quiet = False,
    ) -> int:
        place = find_place()

        def prepare() -> tuple["Recipe", RunOptions]:
            loaded = checked(kind, recipe, overrides or (), quiet=LAUNCHED in os.environ)
            options = RunOptions(
                resume=resume,
                overwrite=overwrite,
                allow_different_environment=allow_different_environment,
                allow_changed_rewards=allow_changed_rewards,
                quiet=quiet,
                recipe_text=loaded.text,
            )
            check_ranks(loaded.recipe, place)
            if not dry_run:
                check_start(loaded.recipe, options)
            elif resume != "never" or overwrite:
                from proximo.run.preflight import check_folders

                check_folders(loaded.recipe, resume=options.resume, overwrite=overwrite)
            return loaded.recipe, options

        with functions_of_the_working_directory():
            if dry_run:
                return _describe(prepare()[0]) if place is None or place.rank == 0 else 0
            if place is not None:
                return run_rank(place, prepare, run=_run)
            given, options = prepare()
            if (num := given.num_ranks) > 1:
                from proximo.distributed.launch import launch

                command = [sys.executable, "-P", "-m", "proximo", *context.obj]
                return launch(command, num=num, when_lost=partial(_write_outcomes, given))
            note_idle_tasks()
            return _run(given, options)

    return command


def _write_outcomes(recipe: "Recipe", by: str, reason: str) -> None:
    """Write the outcome of each run whose rank 0 was killed."""
    from proximo.run.journal import write_outcome_of_lost

    for _, stage in recipe.given_stages():
        write_outcome_of_lost(Path(stage.run.folder), by=by, reason=reason)


def _describe(recipe: "Recipe") -> int:
    """Print what `--dry-run` shows."""
    from proximo.commands.dry_run import describe, find_warnings

    for warning in find_warnings(recipe):
        print(f"note: {warning}", file=sys.stderr)
    print(describe(recipe))
    return 0


def _run(recipe: "Recipe", options: RunOptions) -> int:
    from proximo.kernels import kernels_of

    kernels_of("cpu" if recipe.run.device == "auto" else recipe.run.device).begin()
    with loading(quiet=options.quiet):
        from proximo.commands.pipeline.run import run_recipe
    return run_recipe(recipe, options)
