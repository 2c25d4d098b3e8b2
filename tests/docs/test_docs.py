"""What the pages say exists: links, files, functions, tests, settings, metrics, commands."""

import pydoc
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

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

SECTIONS = (
    "run|devices|engine|model|policy|value|reference|tokenizer|data|ptx_data|sft|reward|dpo|kto|gold|ppo|"
    r"environment(?!\.json)"
)
SETTING = re.compile(rf"(?:{SECTIONS})(?:\.[a-z_0-9]+)+")
METRIC_GROUPS = (
    "score|gold|reward|kl|advantage|group|value|policy|ptx|response|first_minibatch|mismatch|staleness|sft|reward_model|"
    "evaluation|progress|filter|time|throughput|memory|ranks"
)
METRIC = re.compile(rf"(?:{METRIC_GROUPS})/[a-z_0-9/]+")
OPTION = re.compile(r"--[a-z-]+")


def test_links_lead_somewhere() -> None:
    faults = []
    for page in PAGES:
        for target in links(page):
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            if not file.exists() or (anchor and anchor not in anchors(file)):
                faults.append(f"{page.name}: {target}")
    assert not faults


def test_files_functions_and_tests_that_are_named_exist() -> None:
    faults = []
    for page, word in words():
        path, name = named_path(word) or (None, None)
        file = find_path(path) if path else None
        if path and (file is None or (name and name not in defined_names(file))):
            faults.append(f"{page.name}: {word}")
    assert not faults


def test_names_to_import_exist() -> None:
    named = [(page.name, word) for page, word in words() if re.fullmatch(r"proximo(_\w+)?(\.\w+)+", word)]
    assert not [(page, word) for page, word in named if pydoc.locate(word) is None]


def test_settings_that_are_named_are_in_some_recipe() -> None:
    kinds = (SFTRecipe, RewardRecipe, PRMRecipe, DPORecipe, KTORecipe, PPORecipe, PipelineRecipe)
    faults = []
    for page, word in words():
        key = word.partition("=")[0].partition(":")[0]
        if SETTING.fullmatch(key) and not any(has_setting(kind, key.split(".")) for kind in kinds):
            faults.append(f"{page.name}: {word}")
    assert not faults


def words() -> Iterator[tuple[Path, str]]:
    """Every page with each of its code words."""
    return ((page, word) for page in PAGES for word in sorted(code_words(page)))


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


def test_metrics_that_are_named_are_declared() -> None:
    faults = []
    for page, word in words():
        if METRIC.fullmatch(word) and not word.endswith("/"):
            try:
                catalogue().find(word)
            except UnknownMetricError:
                faults.append(f"{page.name}: {word}")
    assert not faults


def test_commands_and_options_that_are_named_exist() -> None:
    commands = typer.main.get_group(app).commands
    known = {*options_of([typer.main.get_command(app)]), "--help"}
    faults = []
    for page in PAGES:
        for said in map(str.split, spoken_lines(page)):
            ours = said[:1] == ["proximo"]
            command = said[1] if ours and len(said) > 1 and said[1].islower() and not said[1].startswith("-") else None
            speaks_of_options = ours or (len(said) == 1 and OPTION.fullmatch(said[0].partition("=")[0]))
            options = {word.partition("=")[0] for word in said if word.startswith("--")} if speaks_of_options else set()
            if (command and command not in commands) or not options <= known:
                faults.append(f"{page.name}: {' '.join(said)}")
    assert not faults


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


def test_make_targets_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {match[1] for page in PAGES for line in spoken_lines(page) if (match := re.match(r"make ([\w-]+)", line))}
    assert named <= targets


def test_the_readme_begins_with_the_two_commands() -> None:
    assert blocks(ROOT / "README.md", "sh")[0].text.split("\n") == ["make demo", "make test", ""]


def test_tables_have_one_header_and_rows_of_one_width() -> None:
    """Else a page shows the source of its table. Within code and after a backslash a bar is text."""
    faults = []
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for table in re.findall(r"(?:^\|.*\n)+", text + "\n", flags=re.MULTILINE):
            head, rule, *rows = [re.sub(r"`[^`]*`|\\\|", "", line) for line in table.splitlines()]
            if not set(rule) <= set("|-: ") or {line.count("|") for line in (rule, *rows)} != {head.count("|")}:
                faults.append(f"{page.name}: {head}")
    assert not faults
