"""Functions of the user that move the process to another folder: the run goes on where it was."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from proximo.cli import main
from proximo.metrics.sinks import TrackedRun
from proximo.run.options import RunOptions
from proximo.user_code import kept_working_directory
from tiny_runs import changed, make_inputs, recipe_of, run

SEEN: list[str] = []


def moving(prompts: list[str], responses: list[str], metadata: list[Any], *, to: str) -> list[float]:
    SEEN.append(os.getcwd())
    os.chdir(to)
    return [float(len(text)) for text in responses]


def moving_rows(*, to: str) -> Iterator[Mapping[str, Any]]:
    os.chdir(to)
    for name in "abcdef":
        yield {"prompt": name}


class Book:
    """A sink that writes where it was told to, and moves too."""

    def __init__(self, run: TrackedRun, to: str) -> None:
        self.path, self.to = run.folder / "book.txt", to

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        os.chdir(self.to)
        with self.path.open("a", encoding="utf-8") as lines:
            lines.write(f"{step}\n")

    def close(self) -> None:
        pass


def test_a_run_with_relative_paths_survives_functions_that_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    inputs, elsewhere = make_inputs(tmp_path), tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    to = {"to": str(elsewhere)}
    recipe = changed(
        recipe_of("ppo", inputs),
        {
            "run.folder": "moved",
            "run.sinks": [{"kind": "function", "function": "test_working_directory:Book", "kwargs": to}],
            "model": {"path": "language_model"},
            "data": {"sources": [{"function": "test_working_directory:moving_rows", "kwargs": to}]},
            "reward": [{"kind": "function", "name": "m", "function": "test_working_directory:moving", "kwargs": to}],
            "gold": None,
            "value": {"init_from": "policy"},
        },
    )
    SEEN.clear()
    assert run("ppo", recipe, RunOptions(quiet=True)) == 0
    assert set(SEEN) == {str(tmp_path)}, "a step saw another folder than the first"
    assert Path.cwd() == tmp_path
    assert list(elsewhere.iterdir()) == []
    made = tmp_path / "moved"
    assert {"metrics.jsonl", "samples.jsonl", "log.txt", "report.html", "checkpoints"} <= set(os.listdir(made))
    assert len((made / "metrics.jsonl").read_text().splitlines()) >= 5
    log = (made / "log.txt").read_text()
    assert "report in moved/report.html" in log
    assert "changed the working directory to" in log
    assert main(["evaluate", "moved", "--output", "answers.jsonl"]) == 2  # it held out no data, and found its model


def test_a_folder_that_is_gone_is_left_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    gone = tmp_path / "gone"
    gone.mkdir()

    def leave() -> None:
        with kept_working_directory():
            os.chdir(gone)
            gone.rmdir()

    with pytest.warns(UserWarning, match="to a removed folder; it is"):
        leave()
    assert Path.cwd() == tmp_path
