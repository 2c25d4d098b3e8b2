"""`proximo config`: prints, checks and describes recipes without running them."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from proximo.cli.training import Overrides, RecipeName
from proximo.errors import ConfigError
from proximo.message_text import with_addresses
from proximo.trainer_kinds import recipe_kind, recipe_kinds, recognise

if TYPE_CHECKING:  # importing the schemas would slow down --help
    from proximo.config.loader import LoadedRecipe

app = typer.Typer(rich_markup_mode=None)


KindOption = Annotated[str | None, typer.Option("--kind", help="The command of the recipe, if its keys are ambiguous.")]


@app.callback()
def config() -> None:
    """Look at recipes without running them.

    \b
    proximo config show ppo ppo.advantage.gae_lambda=1  every key with its value in effect
    proximo config check my.yaml              one line, or every mistake
    proximo config schema ppo                 JSON schema, for an editor

    docs/configuration.md is the reference of all keys.
    """


@app.command()
def show(recipe: RecipeName, overrides: Overrides = None, *, kind: KindOption = None) -> None:
    """Print every key of a recipe with its value in effect, as YAML that is itself a recipe."""
    from proximo.config.loader import resolved_yaml

    print(resolved_yaml(_load(recipe, overrides, kind).recipe), end="")


@app.command()
def check(recipe: RecipeName, overrides: Overrides = None, *, kind: KindOption = None) -> None:
    """Check whether a recipe is valid, and name keys in it that do nothing. Looks at no model and no data."""
    from proximo.config.ineffective_keys import ineffective_keys

    loaded = _load(recipe, overrides, kind)
    for sentence in ineffective_keys(loaded.recipe):
        print(f"note: {sentence}")
    print(f"{loaded.origin} is a valid {kind_of(recipe, kind)} recipe")


@app.command()
def schema(
    kind: Annotated[str | None, typer.Argument(metavar="KIND", help="A command that takes a recipe.")] = None,
) -> None:
    """Print the JSON schema of a kind of recipe, or of all."""
    print(json.dumps(_with_addresses(json_schema(kind if kind is None else _known(kind))), indent=2))


def json_schema(kind: str | None = None) -> dict[str, Any]:
    """JSON schema of one kind of recipe, or of all kinds if `kind` is None."""
    from pydantic.json_schema import models_json_schema

    if kind is not None:
        return _with_names(recipe_kind(kind).schema.model_json_schema())
    references, schema = models_json_schema([(kind.schema, "validation") for kind in recipe_kinds()])
    return _with_names({"title": "A recipe of Proximo", "anyOf": list(references.values()), **schema})


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


def _with_addresses(node: Any) -> Any:
    """The same JSON with the addresses of the pages that its texts name."""
    if isinstance(node, dict):
        return {key: _with_addresses(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_with_addresses(value) for value in node]
    return with_addresses(node) if isinstance(node, str) else node


def _load(recipe: str, overrides: list[str] | None, kind: str | None) -> "LoadedRecipe":
    from proximo.config.loader import load_recipe

    return load_recipe(kind_of(recipe, kind), recipe, overrides or ())


def kind_of(recipe: str, kind: str | None) -> str:
    """The command that a recipe is for: `kind` if given, else inferred from its keys.

    Raises ConfigError if it is unclear.
    """
    from proximo.config.loader import read_document

    if kind is not None:
        return _known(kind)
    guess = recognise(read_document(recipe).data)
    if guess is None:
        raise ConfigError(f"the keys of {recipe} do not tell which command it is for: add --kind={_names()}")
    return guess.name


def _known(kind: str) -> str:
    if kind not in {recipe_kind.name for recipe_kind in recipe_kinds()}:
        raise ConfigError(f"no command {kind} takes a recipe; those that do: {_names()}")
    return kind


def _names() -> str:
    *most, last = (kind.name for kind in recipe_kinds())
    return f"{', '.join(most)} or {last}"
