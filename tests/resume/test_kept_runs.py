"""Runs that earlier versions saved (`keep_runs.py`) are gone on with by this one, or refused by their format's name."""

import json
import re
import tarfile
from pathlib import Path

import pytest
from keep_runs import KEPT, NUM_STEPS, SAVED_STEP, sft

from proximo.checkpoint.manifest import FORMAT
from proximo.cli import main
from proximo.errors import CheckpointError
from proximo.run.checkpoint_lookup import find_checkpoint
from proximo.run.options import RunOptions
from proximo.run.resolved_config import saved_recipe
from proximo.supervised.sft.trainer import SFTTask
from run_outcomes import read_lines
from tiny_runs import Kind, run

ARCHIVES = sorted(KEPT.glob("format-*.tar.gz"))
READ = [path for path in ARCHIVES if path.name == f"format-{FORMAT}.tar.gz"]
RESUME = RunOptions(quiet=True, resume="must", allow_different_environment=True)

pytestmark = pytest.mark.usefixtures("no_report_no_fsync")


@pytest.fixture
def kept(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with tarfile.open(request.param) as packed:
        packed.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def settings(kind: Kind) -> dict:
    return saved_recipe(Path(kind)).model_dump()


def test_there_is_one_of_todays_format() -> None:
    assert READ, "the format has another number: keep a run of it, with python tests/resume/keep_runs.py"


@pytest.mark.parametrize("kept", READ, indirect=True, ids=lambda path: path.name)
@pytest.mark.parametrize("kind", ["sft", "ppo"])
def test_a_kept_run_is_gone_on_with(kept: Path, kind: Kind) -> None:
    """What comes after the checkpoint is what the version that saved it computed, but for another machine's rounding.

    Of PPO the numbers that follow from the state alone: where a token is drawn otherwise, the others part.
    """
    before = read_lines(kept / kind / "metrics.jsonl")
    assert find_checkpoint(kept / kind).step == SAVED_STEP
    assert run(kind, settings(kind), RESUME) == 0
    after = read_lines(kept / kind / "metrics.jsonl")
    assert [line["step"] for line in after] == list(range(NUM_STEPS + 1))
    assert after[: SAVED_STEP + 1] == before[: SAVED_STEP + 1]
    named = ("sft/",) if kind == "sft" else ("kl/coefficient", "policy/learning_rate", "filter/", "progress/epoch")
    compared = 0
    for was, now in zip(before[SAVED_STEP + 1 :], after[SAVED_STEP + 1 :], strict=True):
        for name in (name for name in was if name.startswith(named) and (kind == "sft" or was["step"] == 3)):
            assert now[name] == pytest.approx(was[name], rel=1e-3), f"step {was['step']}, {name}"
            compared += 1
    assert compared >= 6


@pytest.mark.parametrize("kept", READ, indirect=True, ids=lambda path: path.name)
def test_a_kept_run_is_used(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "ppo", "ab ", "--max-new-tokens", "3"]) == 0
    assert main(["evaluate", "ppo"]) == 0
    assert "step 2" in capsys.readouterr().out
    assert main(["export", "sft", "out"]) == 0
    assert json.loads((kept / "out" / "config.json").read_text())["model_type"] == "llama"


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("kept", ARCHIVES, indirect=True, ids=lambda path: path.name)
def test_a_run_of_another_format_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the next format the kept ones of today too."""
    monkeypatch.setattr("proximo.checkpoint.manifest.FORMAT", FORMAT + 1)
    with pytest.raises(CheckpointError, match=r"has format \d+, and .* reads format \d+: go on with the version that"):
        run("sft", sft(), RESUME)


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("kept", READ, indirect=True, ids=lambda path: path.name)
def test_a_kept_run_whose_state_lacks_what_is_needed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later version that asks its state for more than was kept says so."""
    restore = SFTTask.restore
    monkeypatch.setattr(SFTTask, "restore", lambda *given: (given[1].state["task"]["velocity"], restore(*given)))
    with pytest.raises(CheckpointError, match=re.escape("no 'velocity': another version of Proximo saved it")):
        run("sft", settings("sft"), RESUME)
