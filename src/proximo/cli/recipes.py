"""`proximo recipes`: lists, prints and copies the recipes of the package."""

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from proximo.config.shipped import shipped_recipe, shipped_recipes
from proximo.errors import ConfigError

app = typer.Typer(rich_markup_mode=None, invoke_without_command=True)

Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="A name from `proximo recipes`."),
]


@app.callback()
def recipes(context: typer.Context) -> None:
    """List, show or copy the shipped recipes.

    \b
    proximo recipes
    proximo recipes show ppo
    proximo recipes copy ppo my.yaml
    """
    if context.invoked_subcommand is None:
        list_recipes()


@app.command("list")
def list_recipes() -> None:
    """List the shipped recipes, each with its purpose."""
    shipped = shipped_recipes()
    width = max(len(recipe.name) for recipe in shipped)
    for recipe in shipped:
        print(f"{recipe.name:<{width}}  {recipe.summary}")


@app.command()
def show(name: Name) -> None:
    """Print a shipped recipe."""
    print(shipped_recipe(name).text, end="")


@app.command()
def copy(
    name: Name,
    to: Annotated[Path | None, typer.Argument(metavar="FILE", help="Target file; default NAME.yaml.")] = None,
) -> None:
    """Write a shipped recipe to a new file, to change it. Never replaces a file."""
    recipe = shipped_recipe(name)
    target = to or Path(f"{recipe.name}.yaml")
    target = target / f"{recipe.name}.yaml" if target.is_dir() else target
    try:
        _write_new(target, recipe.text)
    except FileExistsError as error:
        raise ConfigError(f"{target} exists and is left as it is: give another name") from error
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}") from error
    print(f"{target}: change it, then try `proximo {recipe.command} {quote(str(target))} --dry-run`")


def _write_new(target: Path, text: str) -> None:
    """Write a new file. If the disk has no room, nothing is left of it."""
    file = target.open("x", encoding="utf-8")
    try:
        with file:
            file.write(text)
    except OSError:
        target.unlink()
        raise
