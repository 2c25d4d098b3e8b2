"""Pushes of a run to the Hub, with a stand-in for its client."""

import json
import signal
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from proximo import SavedRun
from proximo.checkpoint.store import CheckpointStore
from proximo.cli import main
from proximo.config.sinks import PushConfig
from proximo.errors import ProximoError
from proximo.run import journal, loop, pushes
from proximo.run.model_card import CARD
from proximo.run.options import RunOptions
from proximo.run.pushes import git_hash, push_folder
from run.fake_hub import URL, FakeHub
from run_outcomes import read_lines
from tiny_runs import LORA, changed, make_inputs, recipe_of, run
from waiting import LATEST_SECONDS

QUIET = RunOptions(quiet=True)
AGAIN = RunOptions(quiet=True, resume="auto")
NAME = "me/mine"
TOKEN = "hf_tokenofatest"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    hub = FakeHub()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    yield hub
    hub.answers.set()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(journal, "write_report", lambda folder: folder / "report.html")
    place = make_inputs(tmp_path / "place")
    monkeypatch.chdir(place)
    return place


def pushing(place: Path, kind: Any = "sft", **push: Any) -> Any:
    return changed(recipe_of(kind, place), {"run.push": {"name": NAME, **push}})


def test_the_last_model_is_pushed_once_and_privately(place: Path, hub: FakeHub) -> None:
    assert run("sft", pushing(place), QUIET) == 0
    ((message, files),) = hub.commits
    assert message == "Step 5"
    assert {CARD, "config.json", "model.safetensors", "tokenizer.json"} <= files
    assert hub.private == {NAME: True}
    saved = place / "run" / "checkpoints" / "step-000005" / "policy" / "model.safetensors"
    assert hub.repositories[NAME]["model.safetensors"] == saved.read_bytes()
    assert run("sft", pushing(place), AGAIN) == 0
    assert len(hub.commits) == 1
    assert [path.name for path in (place / "run" / "push").iterdir()] == ["state.json"]


def test_each_save_is_pushed_and_the_card_is_that_of_its_step(
    place: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each upload is waited for, as these steps take less time than one."""
    begin = pushes.Pushes.saved

    def and_wait(self: pushes.Pushes, *given: Any, **options: Any) -> None:
        begin(self, *given, **options)
        if self._current is not None:
            wait([self._current[1]], LATEST_SECONDS)
            self.look()

    monkeypatch.setattr(pushes.Pushes, "saved", and_wait)
    assert run("sft", pushing(place, when="save"), QUIET) == 0
    assert [message for message, _ in hub.commits] == ["Step 2", "Step 4", "Step 5"]
    assert all(CARD in files for _, files in hub.commits)
    card = hub.repositories[NAME][CARD].decode()
    assert "from step 5 of supervised fine-tuning" in card
    pushed = {"name": NAME, "step": 5, "card": git_hash(card.encode())}
    assert json.loads((place / "run" / "push" / "state.json").read_text()) == pushed


def test_steps_do_not_wait_for_an_upload_and_the_last_model_comes_after_it(place: Path, hub: FakeHub) -> None:
    hub.answers.clear()
    recipe = pushing(place, when="save")
    options = RunOptions(quiet=True, on_step=lambda step, _: hub.answers.set() if step == 5 else None)
    assert run("sft", recipe, options) == 0
    assert [message for message, _ in hub.commits] == ["Step 2", "Step 5"]


def test_the_best_is_pushed_and_no_worse_one(place: Path, hub: FakeHub) -> None:
    recipe = changed(pushing(place, when="best"), {"run.evaluate_every_steps": 1})
    assert run("sft", recipe, QUIET) == 0
    losses = {line["step"]: line["evaluation/loss"] for line in read_lines(place / "run" / "metrics.jsonl")}
    best = min((2, 4, 5), key=losses.__getitem__)
    assert hub.commits[-1][0] == f"Step {best}"


def test_a_push_that_fails_is_shown_and_tried_again_by_a_resume(
    place: Path, hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.refuses = 1
    assert run("sft", pushing(place), QUIET) == 0
    said = (place / "run" / "log.txt").read_text()
    assert "step 5 was not pushed to me/mine, and the run continues" in said
    assert "the storage is full" in said
    assert TOKEN not in said + capsys.readouterr().err
    assert hub.commits == []
    assert run("sft", pushing(place), AGAIN) == 0
    assert [message for message, _ in hub.commits] == ["Step 5"]


def test_the_outcome_of_a_push_is_in_the_next_line_and_kept_where_the_run_ends_before_it(
    place: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = pushes.Pushes.look

    def when_it_has_ended(self: pushes.Pushes) -> None:
        if self._current is not None:
            wait([self._current[1]], LATEST_SECONDS)
        look(self)

    monkeypatch.setattr(pushes.Pushes, "look", when_it_has_ended)
    hub.refuses = 1
    stopping = RunOptions(quiet=True, on_step=lambda step, _: step == 4 and signal.raise_signal(signal.SIGTERM))
    assert run("sft", changed(pushing(place, when="save"), {"run.save_every_steps": 1}), stopping) != 0
    counted = [line.get("progress/push_failures") for line in read_lines(place / "run" / "metrics.jsonl")]
    assert counted == [None, None, 1, None, None]
    assert json.loads((place / "run" / "push" / "state.json").read_text())["step"] == 3
    noted: list[str] = []
    uploads = pushes.Pushes(PushConfig(name=NAME, when="save"), place / "run", warn=noted.append, note=noted.append)
    uploads.saved(CheckpointStore(place / "run" / "checkpoints"))
    uploads.close()
    assert noted == [f"pushed step 4 to {URL}/{NAME}"]


def test_a_run_that_is_stopped_does_not_wait_and_goes_on_to_push_when_it_is_resumed(place: Path, hub: FakeHub) -> None:
    hub.answers.clear()
    recipe = pushing(place, when="save")
    stopping = RunOptions(quiet=True, on_step=lambda step, _: step == 3 and signal.raise_signal(signal.SIGTERM))
    assert run("sft", recipe, stopping) == 128 + signal.SIGTERM
    assert not list((place / "run" / "push").glob("step-*"))
    hub.answers.set()
    assert run("sft", recipe, AGAIN) == 0
    assert "Step 5" in [message for message, _ in hub.commits]


def test_the_end_of_a_run_waits_only_so_long_for_an_upload(
    place: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.answers.clear()
    monkeypatch.setattr(pushes, "WAIT_MINUTES", 0.002)
    assert run("sft", pushing(place), QUIET) == 0
    assert "it has not ended within 0.002 minutes" in (place / "run" / "log.txt").read_text()
    assert hub.commits == []
    assert not list((place / "run" / "push").glob("step-*"))


def test_a_card_that_was_changed_on_the_hub_stays(place: Path, hub: FakeHub) -> None:
    hub.repositories[NAME] = {CARD: b"mine"}
    assert run("sft", pushing(place), QUIET) == 0
    assert hub.repositories[NAME][CARD] == b"mine"
    assert "model.safetensors" in hub.repositories[NAME]


def test_an_export_goes_the_same_way(place: Path, hub: FakeHub, capsys: Any) -> None:
    assert run("sft", recipe_of("sft", place), QUIET) == 0
    assert main(["export", "run", "out", "--push", NAME, "--private"]) == 0
    assert hub.commits[0][0] == "Step 5 of run"
    assert hub.private == {NAME: True}
    assert capsys.readouterr().out.endswith(f"{URL}/{NAME}\n")
    assert SavedRun("run").export("same", push="me/same", private=True) == Path("same")
    assert hub.repositories["me/same"] == hub.repositories[NAME]
    assert hub.private["me/same"] is True


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "there is no token of the Hub: run `hf auth login`, or set HF_TOKEN"),
        ({"model.lora": LORA, "model.path": "language_model", "model.config": None}, "would load nowhere else"),
        ({"run.push.name": "a/b/c"}, "must be a name on the Hub"),
    ],
)
@pytest.mark.usefixtures("hub")
def test_a_push_that_cannot_work_is_refused_before_anything_is_built(
    changes: dict[str, Any], said: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not changes:
        monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    monkeypatch.setattr(loop, "trainer_of", None)
    with pytest.raises(ValueError, match=said):
        run("sft", changed(pushing(place), changes), QUIET)
    assert not (place / "run").exists()


def test_without_a_server_an_upload_ends_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ProximoError, match="could not be pushed to me/mine"):
        push_folder(tmp_path, NAME, private=True, message="x")


def test_the_stand_in_takes_no_arguments_that_the_client_would_not() -> None:
    with pytest.raises(TypeError, match="repo_id"):
        FakeHub().get_paths_info(name=NAME, paths=[CARD])
