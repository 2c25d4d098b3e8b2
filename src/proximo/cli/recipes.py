"""`proximo recipes` lists, prints and copies the recipes of the package; `proximo config` prints recipes."""

import json
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from proximo.cli.arguments import Overrides, RecipeName
from proximo.config.shipped import shipped_recipe, shipped_recipes
from proximo.errors import ConfigError
from proximo.trainer_kinds import recipe_kind, recipe_kinds

recipes_app = typer.Typer(rich_markup_mode=None, invoke_without_command=True)
config_app = typer.Typer(rich_markup_mode=None)

Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="A name from `proximo recipes`."),
]
KindOption = Annotated[str | None, typer.Option("--kind", help="The command of the recipe, if its keys are ambiguous.")]


@recipes_app.callback()
def recipes(context: typer.Context) -> None:
    """List, show or copy the shipped recipes.

    \b
    proximo recipes
    proximo recipes show ppo
    proximo recipes copy ppo my.yaml
    """
    if context.invoked_subcommand is not None:
        return
    shipped = shipped_recipes()
    width = max(len(recipe.name) for recipe in shipped)
    for recipe in shipped:
        print(f"{recipe.name:<{width}}  {recipe.summary}")


@recipes_app.command("show")
def show_shipped(name: Name) -> None:
    """Print a shipped recipe."""
    print(shipped_recipe(name).text, end="")


@recipes_app.command()
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


@config_app.callback()
def config() -> None:
    """Look at recipes without running them.

    \b
    proximo config show ppo ppo.advantage.gae_lambda=1  every key with its value in effect
    proximo config schema ppo                 JSON schema, for an editor

    docs/configuration.md is the reference of all keys.
    """


@config_app.command()
def show(recipe: RecipeName, overrides: Overrides = None, *, kind: KindOption = None) -> None:
    """Print every key of a recipe with its value in effect, as YAML that is itself a recipe."""
    from proximo.config.loader import load_recipe, resolved_yaml

    print(resolved_yaml(load_recipe(kind_of(recipe, kind), recipe, overrides or ()).recipe), end="")


@config_app.command()
def schema(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="A command that takes a recipe.")],
) -> None:
    """Print the JSON schema of a kind of recipe."""
    print(json.dumps(json_schema(_known(kind)), indent=2))


def json_schema(kind: str) -> dict[str, Any]:
    """JSON schema of a kind of recipe."""
    return _with_names(recipe_kind(kind).schema.model_json_schema())


def _with_names(node: Any) -> Any:
    """The same schema, in which a name alone is also a section of that kind. Items of lists have no such short form."""
    if isinstance(node, list):
        return [_with_names(value) for value in node]
    if not isinstance(node, dict):
        return node
    named = {key: value if key == "items" else _with_names(value) for key, value in node.items()}
    if "discriminator" not in node or "oneOf" not in node:
        return named
    union = {key: named.pop(key) for key in ("oneOf", "discriminator")}
    return {"anyOf": [union, {"enum": list(node["discriminator"]["mapping"])}], **named}


def kind_of(recipe: str, kind: str | None) -> str:
    """The command that a recipe is for: `kind` if given, else inferred from its keys.

    Raises ConfigError if it is unclear.
    """
    from proximo.config import loader

    if kind is not None:
        return _known(kind)
    return loader.kind_of(loader.read_document(recipe), advice=", or give --kind")


def _known(kind: str) -> str:
    if kind not in {recipe_kind.name for recipe_kind in recipe_kinds()}:
        raise ConfigError(f"no command {kind} takes a recipe; those that do: {_names()}")
    return kind


def _names() -> str:
    *most, last = (kind.name for kind in recipe_kinds())
    return f"{', '.join(most)} or {last}"
