"""Generates docs/configuration.md from the config schemas.

PYTHONPATH=tests python -m docs.configuration > docs/configuration.md
"""

import re
import sys
from collections.abc import Iterator
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from proximo.config.schema.base import Section
from proximo.config.schema.fields import alternatives, has_kinds, key_paths, kinds_of, sections_of
from proximo.config.schema.validation_messages import show
from proximo.trainer_kinds import recipe_kinds, trainer_kinds

MOST_PLACES = 6
PAGE = re.compile(r"\bdocs/([\w-]+\.md)")
"""A page as docstrings name it."""
INTRODUCTION = """\
# Configuration

A recipe is a YAML file that defines a run. This page lists every key.

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

Below, the brackets after a key hold its type and its default. Of a few values the first is the default. A key that may
be null is null by default if no other default is given; a section without a default is optional. Where a section has
kinds, `kind: NAME` selects one.
"""


def configuration_page() -> str:
    """The page docs/configuration.md as Markdown."""
    chapters = [INTRODUCTION, *_recipes(), "## Sections\n"]
    sections = _sections()
    with_bases = dict.fromkeys(each for section in sections for each in (*reversed(_bases(section)), section))
    chapters += [_chapter(each, f"At {_places(sections[each])}" if each in sections else "") for each in with_bases]
    return "\n".join(chapters)


def _recipes() -> Iterator[str]:
    """A list of keys for each recipe, after the keys that all single stages share."""
    lines = {kind: [_line(*key) for key in kind.schema.model_fields.items()] for kind in recipe_kinds()}
    stages = [lines[kind] for kind in trainer_kinds()]
    shared = [line for line in stages[0] if all(line in stage for stage in stages)]
    yield "\n".join(["## Recipes\n", "Keys of every recipe but that of a pipeline:\n", *shared, ""])
    for kind, keys in lines.items():
        yield "\n".join([f"### Recipe of `proximo {kind.name}`\n", *(line for line in keys if line not in shared), ""])


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


def _bases(section: type[BaseModel]) -> list[type[BaseModel]]:
    """The sections that it inherits keys from, the nearest first."""
    inherited = [base for base in section.__mro__[1:] if issubclass(base, Section) and base is not Section]
    return [base for base in inherited if base.model_fields.keys() - {"kind"}]


def _chapter(section: type[BaseModel], place: str) -> str:
    """The heading of a section, what it is, where it stands, and the keys that it does not inherit unchanged."""
    bases = _bases(section)
    inherited = {_line(*key) for base in bases for key in base.model_fields.items()}
    lines = [_line(*key) for key in section.model_fields.items() if not (key[0] == "kind" and _kind(section))]
    kind = f", kind `{_kind(section)}`" if place and _kind(section) else ""
    nearest = [base for base in bases if not any(issubclass(other, base) for other in bases if other is not base)]
    also = f"It has the keys of {' and '.join(map(_link, nearest))}" if bases else ""
    own = [line for line in lines if line not in inherited]
    also += " and:" if also and own else "." if also else ""
    words = " ".join(filter(None, [_plain(section.__doc__), f"{place}{kind}." if place else "", also]))
    return "\n".join(filter(None, [f"### {_title(section)}\n\n{words}\n", "\n".join([*own, ""]) if own else ""]))


def _kind(section: type[BaseModel]) -> str:
    """The value of `kind` that selects it, if there is one."""
    kinds = kinds_of(section)
    return kinds[0] if len(kinds) == 1 else ""


def _title(section: type[BaseModel]) -> str:
    return section.__name__.removesuffix("Config")


def _places(places: list[str]) -> str:
    shown = ", ".join(f"`{place}`" for place in places[:MOST_PLACES])
    return shown if len(places) <= MOST_PLACES else f"{shown} and {len(places) - MOST_PLACES} more"


def _line(name: str, field: FieldInfo) -> str:
    values = _values(field)
    kind = ", ".join(f"`{_value(value)}`" for value in values) if values else _type(field)
    kind = "; ".join(filter(None, [kind, _default(field) if not values or field.is_required() else ""]))
    return f"- `{name}` ({kind}): {_plain(field.description)}"


def _values(field: FieldInfo) -> list[Any]:
    """The values of a key that has a few, the default first; empty for any other key."""
    (kind, *others) = alternatives(field.annotation)
    if others or not (kind is bool or get_origin(kind) is Literal):
        return []
    return sorted([False, True] if kind is bool else get_args(kind), key=lambda value: value != field.default)


def _plain(docstring: str | None) -> str:
    """On one line, with links to the pages that it names."""
    return PAGE.sub(r"[\1](\1)", " ".join((docstring or "").split()))


def _type(field: FieldInfo) -> str:
    kinds = alternatives(field.annotation)
    if has_kinds(field.annotation):
        text = _kinds(kinds)
    else:
        text = " or ".join(_name(kind) for kind in kinds if kind is not NoneType)
    text += " or null" if NoneType in kinds else ""
    return ", ".join([text, *filter(None, map(_limit, field.metadata))])


def _kinds(annotations: tuple[Any, ...]) -> str:
    """Each kind of a union of sections, as a link."""
    sections = [section for annotation in annotations for section in sections_of(annotation)]
    links = [f"[{kind}](#{_title(section).lower()})" for section in sections for kind in kinds_of(section)]
    return f"kind {', '.join(links)}"


def _name(kind: Any) -> str:
    if sections := sections_of(kind):
        return _kinds((kind,)) if has_kinds(kind) else " or ".join(map(_link, sections))
    match get_origin(kind):
        case None:
            return {int: "integer", float: "number", str: "text"}.get(kind, "any")
        case origin if origin is Literal:
            return ", ".join(f"`{value}`" for value in get_args(kind))
        case origin if origin is dict:
            return "mapping"
    items = get_args(kind)
    what = _name(items[0]) if has_kinds(items[0]) else " or ".join(_name(item) for item in alternatives(items[0]))
    return f"list of {what}" if items[-1] is Ellipsis else f"list of {len(items)} {what}s"


def _link(section: type[BaseModel]) -> str:
    recipes = {kind.schema: f"recipe-of-proximo-{kind.name}" for kind in recipe_kinds()}
    return f"[{_title(section)}](#{recipes.get(section, _title(section).lower())})"


def _limit(limit: Any) -> str:
    match limit:
        case annotated_types.Ge():
            return f"≥ {limit.ge}"
        case annotated_types.Gt():
            return f"> {limit.gt}"
        case annotated_types.Le():
            return f"≤ {limit.le}"
        case annotated_types.Lt():
            return f"< {limit.lt}"
        case annotated_types.MinLen():
            return f"{limit.min_length} or more"
    return ""


def _default(field: FieldInfo) -> str:
    """The default; empty for null, and for a section that sets nothing."""
    if field.is_required() or field.default_factory_takes_validated_data:
        return "required" if field.is_required() else ""
    value = field.get_default(call_default_factory=True)
    match value:
        case None:
            return ""
        case Section():
            changed = ", ".join(f"{key}: {show(item)}" for key, item in value.model_dump(exclude_unset=True).items())
            return f"`{{{changed}}}`" if changed else ""
        case () | {}:
            return "empty"
        case tuple():
            return f"`[{', '.join(map(show, value))}]`"
    return f"`{_value(value)}`"


def _value(value: Any) -> str:
    return value if isinstance(value, str) and (not value or value.strip()) else show(value)


if __name__ == "__main__":
    sys.stdout.write(configuration_page())
