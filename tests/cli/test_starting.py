"""`proximo init`: every combination of answers is a valid recipe, no file is lost unasked, and a terminal asks."""

import os
import pty
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import yaml

from proximo.cli import main
from proximo.commands.starter_recipe import MACHINES, VERIFIERS, Answers, starter_recipe, trained
from proximo.config.ineffective_keys import ineffective_keys
from proximo.config.loader import load_recipe
from proximo.config.schema.positioned_yaml import parse_document
from recipe_files import SFT

GIVEN = ("--train", "sft", "--model", "owner/model", "--data", "owner/texts", "--machine", "cpu")
REWARDS = ("owner/reward", "proximo.recipes.arithmetic:correct", *VERIFIERS)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("train", trained())
def test_every_answer_makes_a_recipe_that_holds_and_has_no_idle_key(train):
    for machine, reward in product(MACHINES, REWARDS if train == "ppo" else (None,)):
        answers = Answers(train=train, model="owner/model", data="owner/data", reward=reward, machine=machine)
        recipe = load_recipe(train, parse_document(starter_recipe(answers, Path("my.yaml")), "my.yaml")).recipe
        assert recipe.run.folder == "runs/my"
        assert recipe.run.device == (machine if machine in ("cpu", "mps") else "cuda")
        assert ineffective_keys(recipe) == []
        for _, stage in recipe.given_stages():
            assert stage.data.sources[0].path == "owner/data"
            if machine == "cpu":
                limit = stage.data.max_prompt_tokens if hasattr(stage, "ppo") else stage.data.max_tokens
                assert limit is not None
                assert limit <= 512
            for role, model in stage.models().items():
                if role in ("model", "policy", "value"):
                    assert (model.lora is None) == (machine == "large-gpu"), role
        assert "owner/model" in {model.path for _, stage in recipe.given_stages() for model in stage.models().values()}
        if train == "ppo":
            source = recipe.reward[0]
            assert reward in (getattr(source, "path", None), getattr(source, "function", None), source.kind)


def test_an_adapter_gets_ten_times_the_learning_rate(capsys):
    rates = {}
    for machine in ("gpu", "large-gpu"):
        assert main(["init", f"{machine}.yaml", *GIVEN[:-1], machine]) == 0
        rates[machine] = load_recipe("sft", f"{machine}.yaml").recipe.sft.optimizer.learning_rate
    assert rates == {"gpu": pytest.approx(2e-4), "large-gpu": 2e-5}


def test_a_small_file_keeps_most_of_its_rows_for_training(folder, capsys):
    (folder / "texts.jsonl").write_text('{"text": "a"}\n' * 30 + "\n", encoding="utf-8")
    assert main(["init", *GIVEN[:5], "texts.jsonl", *GIVEN[6:]]) == 0
    data = yaml.safe_load((folder / "sft.yaml").read_text(encoding="utf-8"))["data"]
    assert data["sources"] == [{"path": "texts.jsonl"}]
    capsys.readouterr()
    assert main(["sft", "sft.yaml", "--dry-run"]) == 0
    assert (
        "24 rows to learn from, 6 to evaluate on (at most a fifth; held_out_rows asks for 200)"
        in capsys.readouterr().out
    )


def test_what_is_not_there_yet_is_a_note_and_the_recipe_is_written(folder, capsys):
    assert main(["init", "my.yaml", *GIVEN[:5], "./later.jsonl", *GIVEN[6:]]) == 0
    assert "note: before it can run: data.sources.0.path: there is no file " in capsys.readouterr().err
    assert main(["config", "check", "my.yaml"]) == 0


def test_what_no_recipe_may_say_is_refused_and_nothing_is_written(folder, capsys):
    assert main(["init", "my.yaml", *GIVEN[:3], "@sft", *GIVEN[4:]]) == 2
    assert "model.path is '@sft', which has a meaning in a pipeline only" in capsys.readouterr().err
    assert list(folder.iterdir()) == []


def test_without_a_terminal_missing_options_are_named(folder, capsys):
    assert main(["init", "--train", "ppo", "--model", "owner/model"]) == 2
    assert "give --data, --reward, --machine as well" in capsys.readouterr().err
    assert main(["init", *GIVEN, "--reward", "maths"]) == 2
    assert "--train sft takes no --reward" in capsys.readouterr().err
    assert main(["init", "--train", "gpt"]) == 2
    assert f"--train is one of {', '.join(trained())}, got 'gpt'" in capsys.readouterr().err
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "message"), [("my", "ends in .yaml"), ("none/my.yaml", "there is no folder none"), ("s.yaml", "exists")]
)
def test_a_file_that_cannot_or_may_not_be_written_is_refused(name, message, folder, capsys):
    (folder / "s.yaml").write_text("mine", encoding="utf-8")
    assert main(["init", name, *GIVEN]) == 2
    assert message in capsys.readouterr().err
    assert (folder / "s.yaml").read_text(encoding="utf-8") == "mine"


def test_overwrite_replaces_the_file(folder, capsys):
    (folder / "s.yaml").write_text(SFT, encoding="utf-8")
    assert main(["init", "s.yaml", *GIVEN, "--overwrite"]) == 0
    assert load_recipe("sft", "s.yaml").recipe.model.path == "owner/model"
    assert load_recipe("sft", "s.yaml").recipe.run.folder == "runs/s"


def at_a_terminal(arguments: list[str], typed: str) -> tuple[int, str]:
    """Exit status and output of the command, with `typed` at a terminal of its own."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "proximo", *arguments]
    os.write(ours, typed.encode())
    done = subprocess.run(command, stdin=theirs, capture_output=True, text=True, check=False, timeout=600)
    os.close(theirs)
    os.close(ours)
    return done.returncode, done.stdout + done.stderr


def test_a_terminal_asks_all_five_and_again_after_a_name_that_is_none(folder):
    typed = "gpt\nppo\nowner/model\n\nmaths\nlarge-gpu\n"
    status, output = at_a_terminal(["init"], typed)
    assert status == 0, output
    assert f"one of {', '.join(trained())} is wanted, got 'gpt'" in output
    recipe = load_recipe("ppo", "ppo.yaml").recipe
    assert (recipe.model.path, recipe.model.lora, recipe.reward[0].kind) == ("owner/model", None, "maths")
    assert recipe.data.sources[0].path == load_recipe("ppo", "ppo").recipe.data.sources[0].path


@pytest.mark.parametrize(("typed", "status"), [("y\n", 0), ("n\n", 2)])
def test_a_terminal_asks_before_it_replaces_a_file(typed, status, folder):
    (folder / "s.yaml").write_text("mine", encoding="utf-8")
    assert at_a_terminal(["init", "s.yaml", *GIVEN], typed)[0] == status
    assert ((folder / "s.yaml").read_text(encoding="utf-8") == "mine") == (status == 2)
