"""The recipes under examples/ are accepted, and read what is there when the data is at hand."""

import sys
from pathlib import Path

import pytest

from proximo.cli.program import main
from proximo.config.loader import load_recipe, read_document
from proximo.trainer_kinds import recognise
from real_data import real_data

EXAMPLES = sorted(Path(__file__).parents[2].joinpath("examples").glob("*.yaml"))


def command_of(example: Path) -> str:
    kind = recognise(read_document(str(example)).data)
    assert kind is not None
    return kind.name


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 5


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_a_valid_recipe_that_begins_with_its_name(example: Path) -> None:
    assert load_recipe(command_of(example), str(example)).recipe
    assert example.read_text(encoding="utf-8").startswith(f"# {example.stem}: ")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_passes_a_dry_run_where_the_data_is(example: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "data").symlink_to(real_data())
    (tmp_path / "examples").symlink_to(example.parent)
    (tmp_path / "verifiers" / "bin").mkdir(parents=True)
    (tmp_path / "verifiers" / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REWARD_TOKEN", "a-token-of-a-service")
    assert main([command_of(example), str(example), "--dry-run"]) == 0
    said = capsys.readouterr()
    assert "whole run" in said.out
    assert said.err == ""
