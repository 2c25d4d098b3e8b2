"""Checks paths such as `@sft` and `@reward`, which refer to the result of an earlier stage of a pipeline."""

from collections.abc import Iterator, Mapping
from typing import Any

from proximo.config.schema.base import Section
from proximo.config.schema.fields import Path
from proximo.config.schema.validation_messages import Mistake

MARK = "@"


def stage_mistakes(stages: Mapping[str, Section | None]) -> list[Mistake]:
    """A mistake for every `@` path that does not name an earlier stage. What is no stage has the name ""."""
    before: list[str] = []
    mistakes = []
    for name, stage in stages.items():
        for path, value in [] if stage is None else stage_paths(stage, (name,) if name else ()):
            if value not in before:
                known = f"no such stage comes before it; those that do: {', '.join(before) or 'none'}"
                problem = known if name else "that has a meaning in a pipeline only: give a folder or a Hub name"
                mistakes.append(Mistake(path=path, sentence=f"{'.'.join(path)} is {value!r}, but {problem}"))
        before.append(MARK + name)
    return mistakes


def stage_paths(section: Section, prefix: Path) -> Iterator[tuple[Path, str]]:
    """Keys named path or tokenizer, at any depth, whose value begins with @, with their values."""
    for name, value in section:
        yield from _stage_paths_in(value, (*prefix, name))


def _stage_paths_in(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    if isinstance(value, Section):
        yield from stage_paths(value, path)
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _stage_paths_in(item, (*path, str(index)))
    elif isinstance(value, str) and value.startswith(MARK) and path[-1] in ("path", "tokenizer"):
        yield path, value
