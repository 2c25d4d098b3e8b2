"""`@sft` and `@reward`: a path that means what an earlier stage of the same pipeline made. Not where that lies."""

from collections.abc import Iterator, Sequence
from typing import Any

from proximo.config.recipe import Recipe
from proximo.config.schema.base import Section
from proximo.config.schema.fields import Path
from proximo.config.schema.validation_messages import Mistake

MARK = "@"


def stage_mistakes(recipe: Recipe) -> list[Mistake]:
    """Every `@` path that names no stage which comes before its own."""
    names = list(recipe.stages())
    found = []
    for place, (name, stage) in enumerate(recipe.stages().items()):
        for path, value in [] if stage is None else _marked(stage, (name,) if name else ()):
            if not name:
                found.append(_outside_pipeline(path, value))
            elif value.removeprefix(MARK) not in names[:place]:
                found.append(_not_before(path, value, names[:place]))
    return found


def _outside_pipeline(path: Path, value: str) -> Mistake:
    sentence = f"{'.'.join(path)} is {value!r}, which has a meaning in a pipeline only: give a folder or a Hub name"
    return Mistake(path=path, sentence=sentence)


def _not_before(path: Path, value: str, before: Sequence[str]) -> Mistake:
    there = ", ".join(MARK + name for name in before) or "none"
    sentence = f"{'.'.join(path)} is {value!r}, but no such stage comes before it; those that do: {there}"
    return Mistake(path=path, sentence=sentence)


def _marked(section: Section, prefix: Path) -> Iterator[tuple[Path, str]]:
    """The keys named path or tokenizer, at any depth, whose value begins with @."""
    for name, value in section:
        yield from _marked_value(value, (*prefix, name))


def _marked_value(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    if isinstance(value, Section):
        yield from _marked(value, path)
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _marked_value(item, (*path, str(index)))
    elif isinstance(value, str) and value.startswith(MARK) and path[-1] in ("path", "tokenizer"):
        yield path, value
