"""`proximo pass-rate`: measures the difficulty of training prompts, with `commands/pass_rates.py`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from proximo.cli.loading import loading
from proximo.cli.model_commands import check_new_file
from proximo.cli.training import Overrides, RecipeName
from proximo.commands.checked_recipe import checked
from proximo.early_interrupt import EndsSilently
from proximo.ppo.kind import PPO
from proximo.user_code import functions_of_the_working_directory

if TYPE_CHECKING:  # importing the schemas would slow down --help
    from proximo.ppo.recipe import PPORecipe


def add_to(app: typer.Typer) -> None:
    """Add `proximo pass-rate` to the command line."""
    app.command()(pass_rate)


def pass_rate(
    recipe: RecipeName,
    out: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="Output file; it must not exist.")],
    overrides: Overrides = None,
    *,
    samples_per_prompt: Annotated[int, typer.Option(min=1, help="Responses to each prompt.")] = 8,
    num_prompts: Annotated[int | None, typer.Option(min=1, help="Use only this many prompts, from the start.")] = None,
) -> int:
    """Measure how often the policy that a run would start from solves each training prompt of a PPO recipe.

    The file holds the prompts with their scores as base_scores. Use it as the data, with a filter, to leave out prompts
    that are too easy or too hard:

    \b
    proximo pass-rate my.yaml rated.jsonl --samples-per-prompt 8
    proximo ppo my.yaml data.sources='[{path: rated.jsonl}]' data.filter='{above: 0.9, below: 0.1, from_epoch: 0}'
    """
    check_new_file(out)
    with functions_of_the_working_directory():
        with EndsSilently():
            loaded = checked(PPO.name, recipe, overrides or ())
        with loading():
            from proximo.commands.pass_rates import run_pass_rates

        return run_pass_rates(
            cast("PPORecipe", loaded.recipe), out, samples_per_prompt=samples_per_prompt, num_prompts=num_prompts
        )
