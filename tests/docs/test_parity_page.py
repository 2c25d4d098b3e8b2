"""The page docs/parity.md: every row is there once, and every key, command, function and test in it exists."""

import re
from dataclasses import dataclass

import typer
from pages import CODE, ROOT, defined_names, find_path
from test_docs import has_setting

from proximo.cli.program import app
from proximo.commands.pipeline.recipe import PipelineRecipe
from proximo.ppo.recipe import PPORecipe
from proximo.supervised.dpo_recipe import DPORecipe
from proximo.supervised.kto_recipe import KTORecipe
from proximo.supervised.reward_recipe import RewardRecipe
from proximo.supervised.sft_recipe import SFTRecipe

PAGE = ROOT / "docs" / "parity.md"
COUNTS = {"A": 21, "B": 19, "C": 15, "D": 18, "E": 8, "F": 11, "G": 15, "H": 7, "I": 7, "J": 6, "K": 7, "L": 4}
"""Rows of each chapter."""
PLANNED = {"B10", "H2", "H4"}
"""What is not there yet. A row that is done leaves this set and gets its test."""
RECIPES = (SFTRecipe, RewardRecipe, DPORecipe, KTORecipe, PPORecipe, PipelineRecipe)
SOURCES = (ROOT / "src" / "proximo", ROOT / "src")


@dataclass(frozen=True)
class Row:
    """One line of the tables A to L."""

    id: str
    capability: str
    here: str
    tests: str


def table_cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


LINES = PAGE.read_text(encoding="utf-8").splitlines()
ROWS = [Row(*table_cells(line)) for line in LINES if re.match(r"\| [A-L]\d+ ", line)]


def test_every_capability_has_one_row_in_its_order() -> None:
    assert [row.id for row in ROWS] == [f"{letter}{n}" for letter, count in COUNTS.items() for n in range(1, count + 1)]


def test_the_rows_that_are_planned_say_so_and_no_other() -> None:
    assert {row.id for row in ROWS if row.here.startswith("planned: ")} == PLANNED


def test_a_row_that_is_done_names_where_and_tests_and_one_that_is_planned_names_neither() -> None:
    faults = []
    for row in ROWS:
        named = (bool(CODE.findall(row.here)), bool(CODE.findall(row.tests)))
        if named != ((False, False) if row.id in PLANNED else (True, True)):
            faults.append(row.id)
    assert not faults


def test_what_a_row_names_exists() -> None:
    assert not [(row.id, word) for row in ROWS for word in CODE.findall(row.here) if not exists(word)]


def exists(word: str) -> bool:
    """Whether there is such a name in a source, such a command, or such a key."""
    path, _, name = word.partition("::")
    if name:
        file = next((folder / path for folder in SOURCES if (folder / path).is_file()), None)
        return file is not None and name in defined_names(file)
    if word.startswith("proximo "):
        return is_command(word.split()[1:])
    return any(has_setting(recipe, word.split(".")) for recipe in RECIPES)


def is_command(words: list[str]) -> bool:
    """Whether there is this command, with these options."""
    command = typer.main.get_command(app)
    for word in words:
        if word.startswith("--"):
            if word not in {name for option in command.params for name in option.opts}:
                return False
        elif isinstance(command, typer.core.TyperGroup) and word in command.commands:
            command = command.commands[word]
        else:
            return False
    return True


def test_the_tests_that_a_line_names_exist() -> None:
    lines = [line for line in LINES if "`tests/" in line]
    named = [word for line in lines for word in CODE.findall(table_cells(line)[-1])]
    assert len(lines) > 100
    assert not [word for word in named if word != "tests/docs/test_parity_page.py" and not is_test(word)]


def is_test(word: str) -> bool:
    """Whether it is `file::test` or `file::Class.test` of a test here."""
    path, _, name = word.partition("::")
    if not re.fullmatch(r"tests/(\w+/)*test_\w+\.py", path) or not re.fullmatch(r"(Test\w+\.)?test_\w+|Test\w+", name):
        return False
    file = find_path(path)
    return file is not None and name in defined_names(file)
