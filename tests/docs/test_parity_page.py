"""The page docs/parity.md: every row is there once, and every key, command, function and test in it exists."""

import re
from dataclasses import dataclass

import pytest
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
PLANNED = {
    *("B10", "C15"),
    *("H2", "H4"),
}
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
by_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)


def test_every_capability_has_one_row_in_its_order() -> None:
    assert [row.id for row in ROWS] == [f"{letter}{n}" for letter, count in COUNTS.items() for n in range(1, count + 1)]


def test_the_rows_that_are_planned_say_so_and_no_other() -> None:
    assert {row.id for row in ROWS if row.here.startswith("planned: ")} == PLANNED


@by_row
def test_a_row_that_is_done_names_where_and_tests_and_one_that_is_planned_names_neither(row: Row) -> None:
    where, tests = CODE.findall(row.here), CODE.findall(row.tests)
    assert (bool(where), bool(tests)) == ((False, False) if row.id in PLANNED else (True, True))


@by_row
def test_what_a_row_names_exists(row: Row) -> None:
    for word in CODE.findall(row.here):
        path, _, name = word.partition("::")
        if name:
            file = next((folder / path for folder in SOURCES if (folder / path).is_file()), None)
            assert file is not None, word
            assert name in defined_names(file), word
        elif word.startswith("proximo "):
            assert_command(word.split()[1:])
        else:
            assert any(has_setting(recipe, word.split(".")) for recipe in RECIPES), f"{word} is no key of any recipe"


def assert_command(words: list[str]) -> None:
    """The command, and its own options."""
    command = typer.main.get_command(app)
    for word in words:
        if word.startswith("--"):
            assert word in {name for option in command.params for name in option.opts}, words
        else:
            assert isinstance(command, typer.core.TyperGroup), words
            command = command.commands[word]


@pytest.mark.parametrize("line", [line for line in LINES if "`tests/" in line], ids=lambda line: table_cells(line)[0])
def test_the_tests_that_a_line_names_exist(line: str) -> None:
    named = [word for word in CODE.findall(table_cells(line)[-1]) if word != "tests/docs/test_parity_page.py"]
    for word in named:
        path, _, name = word.partition("::")
        assert re.fullmatch(r"tests/(\w+/)*test_\w+\.py", path), word
        assert re.fullmatch(r"(Test\w+\.)?test_\w+|Test\w+", name), word
        file = find_path(path)
        assert file is not None, word
        assert name in defined_names(file), word
