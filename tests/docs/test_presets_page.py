"""docs/presets.md holds each preset against its source: no key is missing, and what differs has a reason."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import yaml
from pages import CODE, ROOT

from proximo.config.loader import load_recipe
from proximo.config.shipped import shipped_recipes

PAGE = ROOT / "docs" / "presets.md"
TEXTS = {recipe.name: recipe.text for recipe in shipped_recipes()}
PLACES = {"configuration", "example", "script", "class", "default", "code", "this run"}
CODES = r"`[^`]+`(?:, `[^`]+`)*"
LINE = re.compile(
    rf"- (?P<theirs>[^`]+) (?P<value>{CODES})(?: \((?P<place>[^)]+)\))?: "
    rf"(?P<keys>{CODES}|no key)(?: = (?P<here>{CODES}))?(?:: (?P<why>.+))?"
)


@dataclass(frozen=True)
class Row:
    """One setting of theirs, and the keys that it has here; none where it has no counterpart.

    `here` is the value of the keys, empty where it is that of theirs.
    """

    preset: str
    theirs: str
    value: str
    place: str
    keys: tuple[str, ...]
    here: str
    why: str


def parts() -> dict[str, str]:
    """Name of a preset -> what the page says of it."""
    _, *found = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(part.split("\n", 1) for part in found)


def rows(preset: str, text: str) -> Iterator[Row]:
    for line in text.splitlines():
        if re.match("- [^`]", line):
            found = LINE.fullmatch(line)
            assert found, f"a line is `- theirs VALUE (place): KEYS = VALUE HERE: why`: {line}"
            keys = tuple(CODE.findall(found["keys"]))
            place, here, why = (found[name] or "" for name in ("place", "here", "why"))
            yield Row(preset, found["theirs"], found["value"], place or "configuration", keys, here, why)


def kept_here(text: str) -> list[str]:
    """The keys that theirs has no setting for."""
    return re.findall(r"^- `([^`]+)`: \w", text, flags=re.MULTILINE)


PARTS = parts()
ROWS = [row for preset, text in PARTS.items() for row in rows(preset, text)]


def kind_of(preset: str) -> str:
    return "pipeline" if TEXTS[preset].startswith("# pipeline") else "ppo"


def resolved(preset: str) -> dict[str, Any]:
    """The recipe with every default."""
    return load_recipe(kind_of(preset), preset, ()).recipe.model_dump(mode="json")


def value_at(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree[int(part)] if isinstance(tree, list) else tree[part]
    return tree


def shown(value: Any) -> str:
    """As YAML writes it, whole numbers without their point."""
    written = value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True).split("\n")[0]
    whole = re.sub(r"(?<![0-9.])([0-9]+)[.]0(?![0-9.e])", r"\1", written)
    return f"`{whole}`"


def keys_set_by(tree: Any, path: str = "") -> Iterator[str]:
    """Dotted; a list of plain values is one."""
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from keys_set_by(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, list) and tree and isinstance(tree[0], Mapping):
        for index, value in enumerate(tree):
            yield from keys_set_by(value, f"{path}.{index}")
    else:
        yield path


def covers(pattern: str, key: str) -> bool:
    """Whether the key is the pattern, or lies below it."""
    return fnmatch(key, pattern) or fnmatch(key, f"{pattern}.*")


def test_every_preset_is_on_the_page_and_no_other_recipe() -> None:
    presets = {name for name, text in TEXTS.items() if "docs/presets.md" in text}
    stages = {f"deepspeed-chat-13b-step{number}" for number in (1, 2, 3)}  # tests/recipes holds them to the pipeline
    assert presets == {*PARTS, *stages}
    assert all("docs/presets.md" in TEXTS[name] for name in TEXTS if "docs/coming-from/" in TEXTS[name])


def test_no_key_of_a_preset_is_missing() -> None:
    faults = []
    for preset, text in PARTS.items():
        kept = kept_here(text)
        said = [key for row in ROWS if row.preset == preset for key in row.keys] + [*kept, "run.folder"]
        keys = list(keys_set_by(yaml.safe_load(TEXTS[preset])))
        faults += [(preset, key) for key in keys if not any(covers(pattern, key) for pattern in said)]
        faults += [(preset, pattern) for pattern in kept if not any(covers(pattern, key) for key in keys)]
    assert not faults


def test_a_row_has_what_the_recipe_has_and_a_reason_where_theirs_is_another() -> None:
    assert len(ROWS) > 200
    trees = {preset: resolved(preset) for preset in PARTS}
    faults = []
    for row in ROWS:
        found = ", ".join(dict.fromkeys(shown(value_at(trees[row.preset], key)) for key in row.keys))
        if row.place not in PLACES:
            faults.append((row, f"the place is none of {sorted(PLACES)}"))
        if row.here != ("" if found == row.value else found) or bool(row.why) != (found != row.value):
            faults.append((row, f"the recipe has {found or 'no key'}"))
    assert not faults
