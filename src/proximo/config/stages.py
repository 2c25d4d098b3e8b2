"""Checks paths such as `@sft` and `@reward`, which refer to the result of an earlier stage of a pipeline."""

from collections.abc import Iterator, Sequence
from typing import Any

from proximo.config.recipe import Recipe
from proximo.config.schema.base import Section
from proximo.config.schema.fields import Path
from proximo.config.schema.validation_messages import Mistake

MARK = "@"


def stage_mistakes(recipe: Recipe) -> list[Mistake]:
    """A mistake for every `@` path that does not name an earlier stage."""
    names = list(recipe.stages())
    mistakes = []
    for index, (name, stage) in enumerate(recipe.stages().items()):
        for path, value in [] if stage is None else _stage_paths(stage, (name,) if name else ()):
            if not name:
                mistakes.append(_outside_pipeline(path, value))
            elif value.removeprefix(MARK) not in names[:index]:
                mistakes.append(_not_before(path, value, names[:index]))
    return mistakes


def _outside_pipeline(path: Path, value: str) -> Mistake:
    sentence = f"{'.'.join(path)} is {value!r}, which has a meaning in a pipeline only: give a folder or a Hub name"
    return Mistake(path=path, sentence=sentence)


def _not_before(path: Path, value: str, before: Sequence[str]) -> Mistake:
    known = ", ".join(MARK + name for name in before) or "none"
    sentence = f"{'.'.join(path)} is {value!r}, but no such stage comes before it; those that do: {known}"
    return Mistake(path=path, sentence=sentence)


def _stage_paths(section: Section, prefix: Path) -> Iterator[tuple[Path, str]]:
    """Keys named path or tokenizer, at any depth, whose value begins with @, with their values."""
    for name, value in section:
        yield from _stage_paths_in(value, (*prefix, name))


def _stage_paths_in(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    if isinstance(value, Section):
        yield from _stage_paths(value, path)
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _stage_paths_in(item, (*path, str(index)))
    elif isinstance(value, str) and value.startswith(MARK) and path[-1] in ("path", "tokenizer"):
        yield path, value
