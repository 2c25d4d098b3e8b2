"""What the pages say exists: links, files, functions, tests, settings, metrics, commands."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import typer
from pages import PAGES, ROOT, anchors, blocks, code_words, defined_names, find_path, links, named_path
from pydantic import BaseModel

from proximo.cli.program import app
from proximo.commands.pipeline.recipe import PipelineRecipe
from proximo.metrics.catalogue import catalogue
from proximo.metrics.definitions import UnknownMetricError
from proximo.ppo.recipe import PPORecipe
from proximo.supervised.dpo_recipe import DPORecipe
from proximo.supervised.kto_recipe import KTORecipe
from proximo.supervised.prm_recipe import PRMRecipe
from proximo.supervised.reward_recipe import RewardRecipe
from proximo.supervised.sft_recipe import SFTRecipe

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)

SECTIONS = "run|devices|engine|model|policy|value|reference|tokenizer|data|ptx_data|sft|reward|dpo|kto|gold|ppo"
SETTING = re.compile(rf"(?:{SECTIONS})(?:\.[a-z_0-9]+)+")
METRIC_GROUPS = (
    "score|gold|reward|kl|advantage|group|value|policy|ptx|response|first_minibatch|mismatch|staleness|sft|reward_model|"
    "evaluation|progress|filter|time|throughput|memory|ranks"
)
METRIC = re.compile(rf"(?:{METRIC_GROUPS})/[a-z_0-9/]+")
OPTION = re.compile(r"--[a-z-]+")


@by_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in links(page):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@by_page
def test_files_functions_and_tests_that_are_named_exist(page: Path) -> None:
    for word in code_words(page):
        named = named_path(word)
        if named is None:
            continue
        path, name = named
        file = find_path(path)
        assert file is not None, word
        assert name is None or name in defined_names(file), word


@by_page
def test_module_paths_that_are_named_exist(page: Path) -> None:
    for word in code_words(page):
        if not re.fullmatch(r"proximo(\.\w+)+", word):
            continue
        parts = word.split(".")
        whole = find_path("/".join(parts[1:]) or ".") or find_path("/".join(parts[1:]) + ".py")
        module = find_path("/".join(parts[1:-1]) + ".py")
        assert whole is not None or (module is not None and parts[-1] in defined_names(module)), word


@by_page
def test_settings_that_are_named_are_in_some_recipe(page: Path) -> None:
    kinds = (SFTRecipe, RewardRecipe, PRMRecipe, DPORecipe, KTORecipe, PPORecipe, PipelineRecipe)
    for word in code_words(page):
        key = word.partition("=")[0].partition(":")[0]
        if SETTING.fullmatch(key):
            assert any(has_setting(kind, key.split(".")) for kind in kinds), word


def has_setting(annotation: object, path: list[str]) -> bool:
    """Whether a key leads to a field."""
    return any(True for _ in fields_at(annotation, path))


def fields_at(annotation: object, path: list[str]) -> Iterator[object]:
    """The types that a key leads to, through optional sections, lists (by number) and free mappings."""
    inner = getattr(annotation, "__args__", ())
    origin = getattr(annotation, "__origin__", None)
    if not path:
        yield annotation
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if field := annotation.model_fields.get(path[0]):
            yield from fields_at(field.annotation, path[1:])
    elif origin is dict:
        yield object
    elif path[0].isdigit() and origin is tuple:
        yield from fields_at(inner[0], path[1:])
    else:
        for each in inner:
            yield from fields_at(each, path)


@by_page
def test_metrics_that_are_named_are_declared(page: Path) -> None:
    unknown = []
    for word in code_words(page):
        if not METRIC.fullmatch(word) or word.endswith("/"):
            continue
        try:
            catalogue().find(word)
        except UnknownMetricError:
            unknown.append(word)
    assert not unknown


@by_page
def test_commands_and_options_that_are_named_exist(page: Path) -> None:
    commands = typer.main.get_group(app).commands
    known = {*options_of([typer.main.get_command(app)]), "--help"}
    for words in map(str.split, spoken_lines(page)):
        ours = words[:1] == ["proximo"]
        if ours and len(words) > 1 and words[1].islower() and not words[1].startswith("-"):
            assert words[1] in commands, words
        if ours or (len(words) == 1 and OPTION.fullmatch(words[0].partition("=")[0])):
            assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known, words


def options_of(commands: Iterable[typer.core.TyperCommand]) -> set[str]:
    """Of the commands, and of those below them."""
    found: set[str] = set()
    for command in commands:
        found |= {name for option in command.params for name in option.opts}
        if isinstance(command, typer.core.TyperGroup):
            found |= options_of(command.commands.values())
    return found


def spoken_lines(page: Path) -> set[str]:
    """Code words, and the lines of shell blocks without their comments."""
    lines = {line.partition(" #")[0] for block in blocks(page, "sh") for line in block.text.splitlines()}
    return code_words(page) | lines


def test_the_index_names_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    wanted = {page.name for page in PAGES if page.parent == index.parent and page != index}
    assert wanted == {target for target in links(index) if "/" not in target and "#" not in target}


@by_page
def test_make_targets_that_are_named_exist(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {match[1] for line in spoken_lines(page) if (match := re.match(r"make ([\w-]+)", line))} <= targets


def test_the_readme_begins_with_the_two_commands() -> None:
    assert blocks(ROOT / "README.md", "sh")[0].text.split("\n") == ["make demo", "make test", ""]


@by_page
def test_tables_have_one_header_and_rows_of_one_width(page: Path) -> None:
    """Else a page shows the source of its table. Within code and after a backslash a bar is text."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for table in re.findall(r"(?:^\|.*\n)+", text + "\n", flags=re.MULTILINE):
        head, rule, *rows = [re.sub(r"`[^`]*`|\\\|", "", line) for line in table.splitlines()]
        assert set(rule) <= set("|-: "), f"{page.name}: the line below the head of a table must be a rule: {head}"
        assert {line.count("|") for line in (rule, *rows)} == {head.count("|")}, f"{page.name}: {head}"
