"""Killed at any write boundary and resumed, a run of each trainer ends with the bits of the uninterrupted one."""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from disk_states import Camera, Picture

from proximo.checkpoint import atomic
from proximo.checkpoint.logs import JsonLines
from proximo.run import journal
from proximo.run.options import RunOptions
from run_outcomes import assert_same_outcome, outcome, read_lines
from tiny_runs import KINDS, NUM_STEPS, SAVED_STEPS, Kind, changed, make_inputs, recipe_of, run

AUTO = RunOptions(quiet=True, resume="auto")
EVERY: dict[Kind, int] = {"reward": 10, "dpo": 10, "kto": 40, "prm": 40}
"""The other supervised trainers write what SFT writes, a model and its optimizer, in the same order: a few moments will
do."""

pytestmark = pytest.mark.usefixtures("no_report_no_fsync")


def film(kind: Kind, recipe: Mapping[str, Any], folder: Path) -> Camera:
    """Run to the end, or go on to it, with a camera on the run folder."""
    with pytest.MonkeyPatch.context() as patch:
        camera = Camera(folder, patch.setattr)
        assert run(kind, recipe, AUTO) == 0
    return camera


def resume_from(picture: Picture, kind: Kind, recipe: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    folder = Path(recipe["run"]["folder"])
    picture.put_back(folder)
    assert run(kind, recipe, AUTO) == 0
    assert_same_outcome(folder, expected, after=picture.moment)
    assert (folder / "metrics.jsonl").read_bytes().startswith(picture.saved_lines)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kill_at_any_write_changes_nothing(kind: Kind, tmp_path: Path) -> None:
    """PPO, whose steps take longest, takes three, of one update, and saves after each: its last save prunes too."""
    place = make_inputs(tmp_path)
    fewer = {"ppo.num_steps": 3, "ppo.prompts_per_step": 3, "run.save_every_steps": 1}
    recipe = changed(recipe_of(kind, place), fewer if kind == "ppo" else {})
    camera = film(kind, recipe, place / "run")
    expected = outcome(place / "run")
    assert camera.num_boundaries > 200
    assert {picture.saved_step for picture in camera} == {None, *((1, 2, 3) if kind == "ppo" else SAVED_STEPS)}
    assert any("after _rename checkpoints/step-" in picture.moment for picture in camera), "none is pruned"
    for picture in list(camera)[:: EVERY.get(kind, 1)]:
        resume_from(picture, kind, recipe, expected)


def test_a_second_kill_at_any_write_while_resuming_changes_nothing(tmp_path: Path) -> None:
    """The first kill left lines of two steps to be cut off, and half of a checkpoint."""
    place = make_inputs(tmp_path)
    recipe = recipe_of("sft", place)
    first = film("sft", recipe, place / "run")
    expected = outcome(place / "run")
    killed_in_a_save = next(p for p in first if p.saved_step == 2 and "_write_file" in p.moment and "state" in p.moment)
    killed_in_a_save.put_back(place / "run")
    second = film("sft", recipe, place / "run")
    known = {tuple(picture.files.items()) for picture in first}
    unseen = [picture for picture in second if tuple(picture.files.items()) not in known]
    assert any("partial-new-metrics.jsonl" in picture.moment for picture in unseen)
    for picture in unseen:
        resume_from(picture, "sft", recipe, expected)


def test_a_kill_anywhere_at_the_end_of_a_run_with_one_save_changes_nothing(tmp_path: Path) -> None:
    place = make_inputs(tmp_path)
    recipe = changed(recipe_of("sft", place), {"run.save_every_steps": None})
    camera = film("sft", recipe, place / "run")
    expected = outcome(place / "run")
    at_the_end = [picture for picture in camera if picture.logged_lines == NUM_STEPS + 1]
    assert len(at_the_end) > 10
    for picture in at_the_end:
        resume_from(picture, "sft", recipe, expected)


def test_the_lines_of_a_step_are_on_disk_before_its_checkpoint_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power failure could leave a checkpoint and lose the lines that led to it, which no resume writes again."""
    place = make_inputs(tmp_path)
    events: list[str] = []

    def note(owner: Any, name: str, event: Callable[..., str]) -> None:
        really = getattr(owner, name)

        def noting(*given: Any) -> None:
            really(*given)
            events.append(event(*given))

        monkeypatch.setattr(owner, name, noting)

    note(JsonLines, "append", lambda log, _record: f"append {Path(log._file.name).name}")
    note(JsonLines, "sync", lambda log: f"sync {Path(log._file.name).name}")
    note(atomic, "_rename", lambda _path, new_path: f"rename {new_path.name}")
    run("reward", recipe_of("reward", place), AUTO)
    for step in SAVED_STEPS:
        before = events[: events.index(f"rename step-{step:06d}")]
        for log in ("metrics.jsonl", "samples.jsonl"):
            assert [event for event in before if event.endswith(log)][-1] == f"sync {log}"


def test_a_run_killed_before_its_report_gets_it_when_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_report(folder: Path) -> Path:
        (folder / "report.html").write_text(str(len(read_lines(folder / "metrics.jsonl"))))
        return folder / "report.html"

    place = make_inputs(tmp_path)
    recipe = recipe_of("sft", place)
    report = place / "run" / "report.html"
    run("sft", recipe, AUTO)
    assert not report.exists()
    monkeypatch.setattr(journal, "write_report", write_report)
    assert run("sft", recipe, AUTO) == 0
    assert report.read_text() == str(NUM_STEPS + 1)

    report.write_text("of an earlier, shorter run")
    os.utime(report, (0, 0))
    assert run("sft", recipe, AUTO) == 0
    assert report.read_text() == str(NUM_STEPS + 1)

    report.write_text("the latest")
    os.utime(report, (time.time() + 60,) * 2)
    assert run("sft", recipe, AUTO) == 0
    assert report.read_text() == "the latest"
