"""Loads recipes, validated and frozen: from a file with overrides, or the settings that a run saved. Imports no torch.

Relative paths in a recipe are relative to the working directory, not to the file. Environment variables are not
expanded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from proximo.config.recipe import Recipe
from proximo.config.rewards.kinds import RewardSection, RewardSourceConfig
from proximo.config.schema.base import Section
from proximo.config.schema.overrides import apply_overrides, parse_override
from proximo.config.schema.positioned_yaml import Document, as_yaml, parse_document
from proximo.config.schema.validation_messages import Source, explain, message_of
from proximo.config.shipped import is_shipped_name, shipped_recipe
from proximo.config.stages import stage_mistakes, stage_paths
from proximo.errors import ConfigError, RunFolderError
from proximo.trainer_kinds import recipe_kind, recipe_kinds, recognise

Kind = TypeVar("Kind", bound=Section)


@dataclass(frozen=True, kw_only=True)
class LoadedRecipe:
    """A recipe and its source."""

    recipe: Recipe
    text: str
    """The text of the file, after one comment line per override."""
    origin: str
    """The file's path, or the shipped recipe's name."""


def load_recipe(kind: str, given: str | Document, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Read the recipe at a path, the shipped recipe of that name, or a parsed document, and apply the overrides.

    Raises ConfigError. Its message lists all mistakes with file, line, key, given value and expected value.
    """
    schema = recipe_kind(kind).schema
    document = given if isinstance(given, Document) else read_document(given)
    source = _source(document, overrides, schema)
    try:
        recipe = schema.model_validate(source.tree)
    except ValidationError as error:
        guess = recognise(source.tree)
        if guess is not None and guess.name != kind:
            raise ConfigError(
                f"{source.document.origin} is a recipe for `proximo {guess.name}`, not for `proximo {kind}`"
            ) from error
        raise ConfigError(message_of(explain(error.errors(include_url=False), source), source)) from error
    if mistakes := stage_mistakes(recipe.stages()):
        raise ConfigError(message_of(mistakes, source))
    comments = "".join(f"# override: {override.text}\n" for override in source.overrides)
    return LoadedRecipe(recipe=recipe, text=comments + source.document.text, origin=source.document.origin)


def load_reward_section(given: str, overrides: Sequence[str] = ()) -> tuple[Sequence[RewardSourceConfig], Path | None]:
    """The reward sources of a recipe, or of a file with only `reward`; the folder of a pipeline whose stages they name.

    Raises ConfigError as `load_recipe` does, and for a recipe without reward sources.
    """
    document = read_document(given)
    kind = recognise(document.data)
    if kind is not None:
        recipe = load_recipe(kind.name, document, overrides).recipe
        for _, stage in recipe.given_stages():
            if sources := stage.reward_sources():
                of_stages = stage is not recipe and any(any(stage_paths(each, ())) for each in sources)
                return sources, Path(recipe.run.folder) if of_stages else None
        raise ConfigError(
            f"{document.origin} is a recipe for `proximo {kind.name}`, which has no reward sources to serve"
        )
    source = _source(document, overrides, RewardSection)
    try:
        section = RewardSection.model_validate(source.tree)
    except ValidationError as error:
        raise ConfigError(message_of(explain(error.errors(include_url=False), source), source)) from error
    if mistakes := stage_mistakes({"": section}):
        raise ConfigError(message_of(mistakes, source))
    return section.reward, None


def kind_of(document: Document, *, advice: str = "") -> str:
    """The command that a recipe is for, by its sections. Raises ConfigError if they fit none, or several.

    `advice`: what else the caller could give, for the message.
    """
    kind = recognise(document.data)
    if kind is None:
        names = ", ".join(each.name for each in recipe_kinds())
        raise ConfigError(
            f"{document.origin} has no section that shows what it trains: it needs one of {names}{advice}"
        )
    return kind.name


def _source(document: Document, overrides: Sequence[str], schema: type[Section]) -> Source:
    parsed = tuple(parse_override(text) for text in overrides)
    tree = apply_overrides(document.data, parsed, schema)
    return Source(document=document, overrides=parsed, schema=schema, tree=tree)


def read_document(path_or_name: str) -> Document:
    """Parse the YAML of a recipe. Raises ConfigError if it is not a mapping."""
    if is_shipped_name(path_or_name):
        document = parse_document(shipped_recipe(path_or_name).text, path_or_name)
    else:
        document = parse_document(_file_text(Path(path_or_name)), path_or_name)
    if not isinstance(document.data, dict):
        what = "is empty" if document.data is None else "is not a mapping of keys to values"
        raise ConfigError(f"{path_or_name} {what}; `proximo recipes copy ppo` writes one to start from")
    return document


def _file_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError(f"no recipe file {path}; `proximo recipes` lists the shipped recipes") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: byte {error.start + 1} cannot be read") from error
    except OSError as error:
        raise ConfigError(f"the recipe {path} cannot be read: {error.strerror}") from error


def resolved_yaml(recipe: Section) -> str:
    """The resolved recipe as YAML, which can be loaded as a recipe."""
    return as_yaml(recipe.model_dump(mode="json"))


def read_saved(kind: type[Kind], saved: Mapping[str, Any], *, saved_by: str | None) -> Kind:
    """Build a section from its dump.

    Raises RunFolderError for settings that this version does not take. `saved_by`: the version that saved them, if
    known.
    """
    try:
        return kind(**saved)
    except ConfigError as error:
        version = "the version of Proximo that saved it" if saved_by is None else f"proximo {saved_by}, which saved it"
        raise RunFolderError(
            "the run was saved with settings that this version of Proximo does not take: go on with "
            f"{version}, or start a run in another folder ({error})"
        ) from error
