"""What Tab offers: commands, recipes, run folders, checkpoints; and nothing heavy is imported for it."""

import os
import subprocess
import sys

import pytest

from proximo.cli.completion import MOST_FOLDERS, run_folders
from proximo.config.shipped import shipped_recipes


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for run in ("runs/one", "runs/pipeline/sft", "runs/pipeline/ppo"):
        (tmp_path / run / "checkpoints" / "step-000005").mkdir(parents=True)
        (tmp_path / run / ".proximo-run").touch()
    (tmp_path / "runs" / "no-run").mkdir()
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "other.yml").touch()
    (tmp_path / "notes.txt").touch()
    return tmp_path


def offered(*words: str) -> list[str]:
    """What bash would offer for the last word."""
    environment = os.environ | {
        "_PROXIMO_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(("proximo", *words)),
        "COMP_CWORD": str(len(words)),
    }
    script = "import sys; from proximo.cli import main\ntry: main([])\nfinally: print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    *lines, has_torch = done.stdout.splitlines()
    assert has_torch == "False"
    return lines


def test_commands_and_names_of_recipes(folder):
    assert {"sft", "ppo", "init", "doctor"} <= set(offered(""))
    assert offered("recipes", "show", "gsm") == ["gsm8k-7b-vllm", "gsm8k-vllm", "gsm8k"]
    assert offered("init", "--train", "p") == ["prm", "ppo", "pipeline"]


def test_recipes_are_those_of_the_command_and_files(folder):
    shipped = [recipe.name for recipe in shipped_recipes() if recipe.command == "sft"]
    assert offered("sft", "") == [*shipped, "mine.yaml", "recipes/other.yml"]
    assert offered("config", "check", "m") == ["mbpp", "mine.yaml"]
    assert offered("sft", "./rec") == ["./recipes/other.yml"]


def test_runs_and_their_checkpoints(folder):
    assert offered("export", "ru") == ["runs/one", "runs/pipeline", "runs/pipeline/ppo", "runs/pipeline/sft"]
    assert offered("generate", "runs/o") == ["runs/one"]
    assert offered("evaluate", "runs/one", "--checkpoint", "") == ["latest", "best", "step-000005"]


def test_a_large_tree_is_not_searched_to_its_end(folder, monkeypatch):
    monkeypatch.setattr("proximo.cli.completion.MOST_FOLDERS", 2)
    assert run_folders("") == []
    monkeypatch.setattr("proximo.cli.completion.MOST_FOLDERS", MOST_FOLDERS)
    assert "runs/one" in run_folders("")
