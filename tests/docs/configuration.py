"""Generates docs/configuration.md from the config schemas.

PYTHONPATH=tests python -m docs.configuration > docs/configuration.md
"""

import sys
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from proximo.config.schema.base import Section
from proximo.config.schema.fields import alternatives, key_paths, kinds_of, sections_of
from proximo.config.schema.validation_messages import show
from proximo.trainer_kinds import recipe_kinds, trainer_kinds

MOST_PLACES = 6
INTRODUCTION = """\
# Configuration

A recipe is a YAML file that defines a run. This page lists every key. It is generated from the schemas in
`src/proximo/config/`, and a test compares the two.

```
proximo recipes                              # list the shipped recipes
proximo recipes copy ppo my.yaml             # copy one
proximo ppo my.yaml --dry-run                # preview the run in numbers
proximo ppo my.yaml run.seed=1 ppo.kl.coefficient=0.1
proximo config show my.yaml ppo.advantage.gae_lambda=1 # every key with its effective value
proximo config schema ppo                    # JSON schema, for an editor
```

## Rules

- An unknown key is an error that names the nearest key; so is a duplicate key. All errors are listed at once.
- Scalars follow YAML 1.2: `1e-5` is a number; `no`, `on` and `12:30` are text; `0o17` is octal and `017` is seventeen.
  A value that begins with `@` needs quotes. Anchors, aliases and merge keys work; tags are not allowed.
- `key.sub=value` on the command line overrides a value of the file. Write lists and mappings in flow style
  (`'ppo.rollout.stop_strings=["\\n\\n"]'`). Address list items by number from 0 (`data.sources.0.path=mine.jsonl`); the
  number after the last item appends one. `key=null` sets a nullable key to null and resets other keys to their default.
  Changing `kind` removes the keys of the previous kind.
- A partial section keeps the defaults of its other keys.
- Relative paths are relative to the working directory. Environment variables are not expanded.
- The run folder keeps the recipe with its overrides as comments (`config.yaml`) and all effective values
  (`config.resolved.json`). The latter is also a recipe: `proximo ppo runs/x/config.resolved.json --resume`.
"""


def configuration_page() -> str:
    """The page docs/configuration.md as Markdown."""
    chapters = [INTRODUCTION]
    for kind in recipe_kinds():
        chapters.append(f"## Recipe of `proximo {kind.name}`\n\n{_table(kind.schema)}\n")
    chapters.append("## Sections\n")
    for section, places in _sections().items():
        chapters.append(f"### {_title(section)}\n\n{_prose(section)}\n\nAt {_places(places)}.\n\n{_table(section)}\n")
    return "\n".join(chapters)


def _sections() -> dict[type[BaseModel], list[str]]:
    """Section -> the paths at which it occurs in the recipes of single stages."""
    places: dict[type[BaseModel], list[str]] = {}
    for kind in trainer_kinds():
        for path, section in key_paths(kind.schema):
            if len(path) > 1:
                paths = places.setdefault(section, [])
                if (name := ".".join(path[:-1])) not in paths:
                    paths.append(name)
    return places


def _title(section: type[BaseModel]) -> str:
    return section.__name__.removesuffix("Config")


def _prose(section: type[BaseModel]) -> str:
    return " ".join((section.__doc__ or "").split())


def _places(places: list[str]) -> str:
    shown = ", ".join(f"`{place}`" for place in places[:MOST_PLACES])
    return shown if len(places) <= MOST_PLACES else f"{shown} and {len(places) - MOST_PLACES} more"


def _table(section: type[BaseModel]) -> str:
    rows = [
        f"| `{name}` | {_type(field)} | {_default(field)} | {_cell(field.description or '')} |"
        for name, field in section.model_fields.items()
    ]
    return "\n".join(["| Key | Type | Default | Meaning |", "|---|---|---|---|", *rows])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _type(field: FieldInfo) -> str:
    text = " or ".join(_name(kind) for kind in alternatives(field.annotation) if kind is not NoneType)
    null = ["null"] if NoneType in alternatives(field.annotation) else []
    limits = [_limit(limit) for limit in field.metadata]
    return _cell(", ".join([" or ".join([text, *null]), *filter(None, limits)]))


def _name(kind: Any) -> str:
    if sections := sections_of(kind):
        return " or ".join(_link(section) for section in sections)
    match get_origin(kind):
        case None:
            return {int: "whole number", float: "number", str: "text", bool: "true or false"}.get(kind, "any")
        case origin if origin is Literal:
            return " or ".join(f"`{value}`" for value in get_args(kind))
        case origin if origin is dict:
            return "mapping"
    items = get_args(kind)
    what = " or ".join(_name(item) for item in alternatives(items[0]))
    return f"list of {what}" if items[-1] is Ellipsis else f"list of {len(items)} ({what})"


def _link(section: type[BaseModel]) -> str:
    kinds = f" (kind {', '.join(kinds_of(section))})" if kinds_of(section) else ""
    recipes = {kind.schema: f"recipe-of-proximo-{kind.name}" for kind in recipe_kinds()}
    return f"[{_title(section)}](#{recipes.get(section, _title(section).lower())}){kinds}"


def _limit(limit: Any) -> str:
    match limit:
        case annotated_types.Ge():
            return f"at least {limit.ge}"
        case annotated_types.Gt():
            return f"above {limit.gt}"
        case annotated_types.Le():
            return f"at most {limit.le}"
        case annotated_types.Lt():
            return f"below {limit.lt}"
        case annotated_types.MinLen():
            return f"{limit.min_length} or more"
    return ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    match value:
        case Section():
            changed = ", ".join(f"{key}: {show(item)}" for key, item in value.model_dump(exclude_unset=True).items())
            return f"`{{{changed}}}`" if changed else "its defaults"
        case () | {}:
            return "empty"
        case tuple():
            return f"`[{', '.join(map(show, value))}]`"
    return f"`{value if isinstance(value, str) and (not value or value.strip()) else show(value)}`"


if __name__ == "__main__":
    sys.stdout.write(configuration_page())
