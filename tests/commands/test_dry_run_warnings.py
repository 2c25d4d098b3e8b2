"""What a dry run finds in the files of the machine, before anything is loaded."""

import json
import re
from importlib import metadata
from pathlib import Path

import pytest

from proximo.cli import main
from proximo.run import dry_run as lines
from recipe_files import PIPELINE, PPO, SFT, write_recipe


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 100}))
    (tmp_path / "small" / "tokenizer.json").write_text("{}")
    rows = [{"prompt": f"add {number}", "response": "an answer"} for number in range(10)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def dry_run(capsys, kind, text, *overrides):
    status = main([kind, write_recipe(Path.cwd(), text), *overrides, "--dry-run"])
    said = capsys.readouterr()
    return status, said.out, said.err


@pytest.mark.parametrize(("kind", "text"), [("sft", SFT), ("ppo", PPO)])
def test_the_rows_of_files_are_counted(capsys, kind, text):
    status, out, err = dry_run(capsys, kind, text, "data.sources.0.path=t.jsonl", "data.held_out_rows=2")
    assert (status, err) == (0, "")
    assert re.search("8 rows to learn from, 2 to evaluate on$", out, flags=re.MULTILINE)


def test_rows_held_out_of_a_small_file_are_a_fifth_and_the_line_says_so(capsys):
    status, out, err = dry_run(capsys, "sft", SFT, "data.sources.0.path=t.jsonl", "data.held_out_rows=10")
    assert (status, err) == (0, "")
    assert "8 rows to learn from, 2 to evaluate on (at most a fifth; held_out_rows asks for 10)" in out


def test_new_tokens_that_an_adapter_does_not_train_are_told(capsys):
    added, lora = "tokenizer.added_tokens=[<a>, <b>]", "model.lora={rank: 2}"
    status, _, err = dry_run(capsys, "sft", SFT, added, lora)
    assert status == 0
    assert "note: model.lora trains no embedding: the rows of <a>, <b> stay as they start" in err
    assert dry_run(capsys, "sft", SFT, added)[2] == dry_run(capsys, "sft", SFT, lora)[2] == ""


def test_data_that_are_large_or_elsewhere_are_not_read(capsys, monkeypatch):
    monkeypatch.setattr(lines, "read_split", lambda *_, **__: pytest.fail("read"))
    assert dry_run(capsys, "sft", SFT, "data.held_out_rows=10")[0] == 0
    monkeypatch.setattr(lines, "MOST_BYTES", 10)
    status, out, _ = dry_run(capsys, "sft", SFT, "data.sources.0.path=t.jsonl", "data.held_out_rows=10")
    assert status == 0
    assert "at most 10 rows held out for evaluation" in out


@pytest.mark.parametrize(
    ("kind", "text", "overrides", "told"),
    [
        ("sft", SFT, ["model.path=small"], "model reads at most 100 positions, and data.max_tokens is 1024"),
        (
            "ppo",
            PPO,
            ["model.path=small", "ppo.rollout.max_new_tokens=40"],
            "model reads at most 100 positions, and data.max_prompt_tokens (512) + ppo.rollout.max_new_tokens (40) "
            "make 552: prompts of more than 60 tokens would end the run",
        ),
        ("ppo", PPO, ["reward.0.path=small", "ppo.rollout.max_new_tokens=4"], "note: reward.0 reads at most 100"),
        (
            "pipeline",
            PIPELINE,
            ["sft.model={config: {model_type: gpt2, n_positions: 64}}", "sft.tokenizer.train_vocab_size=300"],
            "note: sft.model reads at most 64 positions",
        ),
    ],
)
def test_positions_that_may_not_do_are_told(capsys, kind, text, overrides, told):
    status, _, err = dry_run(capsys, kind, text, *overrides)
    assert status == 0
    assert told in err


def test_positions_that_answers_alone_fill_are_a_mistake(capsys):
    status, _, err = dry_run(capsys, "ppo", PPO, "model.path=small")
    assert status == 2
    assert "model reads at most 100 positions, which ppo.rollout.max_new_tokens (128) alone fills" in err


def test_episodes_beyond_the_positions_are_refused_as_by_the_run(capsys):
    Path("guess.py").write_text("class Guess: ...\n")
    text = "run: {folder: runs/e}\nmodel: {path: small}\nenvironment: {path: guess.py:Guess}\n"
    status, _, err = dry_run(capsys, "ppo", text)
    assert status == 2
    assert "up to 1024 tokens, but model reads at most 100 positions; lower environment.max_tokens" in err
    assert dry_run(capsys, "ppo", text, "environment.max_tokens=100")[0] == 0


def test_a_device_that_is_not_there_is_told_and_refused(capsys, monkeypatch):
    monkeypatch.setattr("proximo.commands.dry_run.version", lambda name: f"{metadata.version(name).split('+')[0]}+cpu")
    status, _, err = dry_run(capsys, "sft", SFT, "run.device=cuda")
    assert status == 0
    assert "run.device is cuda, but torch" in err
    assert "is a build for CPUs" in err
    assert main(["sft", "r.yaml", "run.device=cuda"]) == 2
    assert "is a build for CPUs: use auto or cpu" in capsys.readouterr().err


def test_more_threads_than_cores_are_noted(capsys, monkeypatch):
    monkeypatch.setattr(lines, "num_cores", lambda: 2)
    source = "data.sources.0.path=t.jsonl"
    status, _, err = dry_run(capsys, "sft", SFT, source, "data.held_out_rows=3", "run.num_threads=3")
    assert status == 0
    assert "run.num_threads is 3, more than the 2 cores that this process may use" in err
    assert dry_run(capsys, "sft", SFT, source, "data.held_out_rows=3", "run.num_threads=2")[2] == ""
