"""What a dry run finds in the files of the machine, before anything is loaded."""

import json
import re
from pathlib import Path

import pytest

from proximo.cli import main
from proximo.run import dry_run as lines
from recipe_files import PPO, SFT, write_recipe


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
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


def test_more_threads_than_cores_are_noted(capsys, monkeypatch):
    monkeypatch.setattr(lines, "num_cores", lambda: 2)
    source = "data.sources.0.path=t.jsonl"
    status, _, err = dry_run(capsys, "sft", SFT, source, "data.held_out_rows=3", "run.num_threads=3")
    assert status == 0
    assert "run.num_threads is 3, more than the 2 cores that this process may use" in err
    assert dry_run(capsys, "sft", SFT, source, "data.held_out_rows=3", "run.num_threads=2")[2] == ""
