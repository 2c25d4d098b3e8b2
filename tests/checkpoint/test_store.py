"""What a checkpoint store keeps, verifies and refuses."""

import json
import shutil
from pathlib import Path

import pytest
from checkpoint_faults import FaultyDisk, is_whole, save

from proximo.checkpoint.store import CheckpointStore
from proximo.errors import CheckpointError


@pytest.fixture
def disk(monkeypatch) -> FaultyDisk:
    return FaultyDisk(monkeypatch.setattr)


def write_something(path: Path) -> None:
    path.write_bytes(b"something")


def test_an_empty_store_has_no_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    assert (store.latest(), store.best(), store.steps()) == (None, None, ())
    with pytest.raises(CheckpointError, match="no checkpoint yet"):
        store.load()
    assert not store.folder.exists()


def test_a_checkpoint_comes_back_as_it_was_saved(tmp_path):
    store = CheckpointStore(tmp_path)
    state = {"step": 7, "kl_coefficient": 0.1 + 0.2, "counts": [1, 2**60], "nested": {"text": "é\n"}, "none": None}
    saved = store.save(7, {"policy/weights": write_something}, state, metric=0.25)
    loaded = CheckpointStore(tmp_path).load()
    assert loaded == saved == store.latest()
    assert (loaded.step, loaded.state, loaded.metric) == (7, state, 0.25)
    assert loaded.path("policy/weights").read_bytes() == b"something"
    assert loaded.path("policy").is_dir()
    assert (tmp_path / "latest").read_text() == "step-000007\n"
    manifest = json.loads((tmp_path / "step-000007" / "manifest.json").read_text())
    assert set(manifest["files"]) == {"policy/weights", "state.json"}
    assert manifest["files"]["policy/weights"]["num_bytes"] == 9


def test_asking_for_a_part_that_was_not_saved_says_what_there_is(tmp_path):
    checkpoint = CheckpointStore(tmp_path).save(1, {"policy": write_something}, {})
    with pytest.raises(CheckpointError, match=r"has no 'value'; it holds manifest\.json, policy, state\.json"):
        checkpoint.path("value")


@pytest.mark.parametrize(
    ("keep_last", "best", "kept"),
    [
        (None, "highest", (1, 2, 3, 4, 5)),
        (1, "highest", (2, 5)),
        (2, "highest", (2, 4, 5)),
        (1, "lowest", (1, 5)),
        (9, "lowest", (1, 2, 3, 4, 5)),
    ],
)
def test_the_last_and_the_best_are_kept(keep_last, best, kept, tmp_path, disk):
    store = CheckpointStore(tmp_path, keep_last=keep_last, best=best)
    for step, metric in enumerate([0.1, 0.9, 0.9, None, float("nan")], start=1):
        save(store, disk, step, metric)
    assert store.steps() == kept
    best_step = 2 if best == "highest" else 1
    assert store.best().step == best_step
    assert (tmp_path / "best").read_text() == f"step-{best_step:06d}\n"
    assert all(is_whole(store.load(step)) for step in kept)


def test_without_metrics_there_is_no_best(tmp_path, disk):
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, disk, 1)
    save(store, disk, 2)
    assert store.best() is None
    assert store.steps() == (2,)
    assert not (tmp_path / "best").exists()


def test_keeping_none_at_all_is_refused(tmp_path):
    with pytest.raises(ValueError, match="keep_last must be at least 1"):
        CheckpointStore(tmp_path, keep_last=0)


def test_steps_of_more_than_six_digits_are_in_order(tmp_path, disk):
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in (999_998, 999_999, 1_000_000):
        save(store, disk, step)
    assert store.steps() == (999_999, 1_000_000)
    assert store.latest().step == 1_000_000


def test_saving_the_latest_step_again_changes_nothing(tmp_path, disk):
    store = CheckpointStore(tmp_path)
    first = save(store, disk, 3, 0.5)
    disk.watch(tmp_path)
    assert save(store, disk, 3) == first
    assert disk.effects == []


def test_saving_the_latest_step_with_another_outcome_is_refused(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(3, {}, {"kl_coefficient": 0.5}, metric=1.0)
    with pytest.raises(CheckpointError, match="same step 3"):
        store.save(3, {}, {"kl_coefficient": 0.6})
    with pytest.raises(CheckpointError, match="same step 3"):
        store.save(3, {}, {"kl_coefficient": 0.5}, metric=2.0)


def test_going_on_from_an_earlier_checkpoint_gives_up_the_later_ones(tmp_path, disk):
    store = CheckpointStore(tmp_path, keep_last=3)
    for step in (1, 2, 3, 4):
        save(store, disk, step)
    (tmp_path / "latest").write_text("step-000002\n")
    assert store.latest().step == 2
    save(store, disk, 3)
    assert store.steps() == (2, 3)
    assert is_whole(store.load())


def test_a_lost_pointer_means_the_newest(tmp_path, disk):
    store = CheckpointStore(tmp_path)
    save(store, disk, 1)
    save(store, disk, 2)
    (tmp_path / "latest").unlink()
    assert store.latest().step == 2


def damage_size(folder: Path) -> None:
    (folder / "policy" / "model.safetensors").write_bytes(b"short")


def damage_contents(folder: Path) -> None:
    path = folder / "policy" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")


DAMAGES = {
    "size": (damage_size, r"model\.safetensors has 5 bytes, the manifest says 180", True),
    "contents": (damage_contents, r"model\.safetensors has other contents", False),
    "missing file": (lambda folder: (folder / "state.json").unlink(), r"state\.json is missing", True),
    "missing manifest": (lambda folder: (folder / "manifest.json").unlink(), r"manifest\.json is missing", True),
    "torn manifest": (lambda folder: (folder / "manifest.json").write_text('{"format'), "is not a manifest", True),
    "foreign manifest": (lambda folder: (folder / "manifest.json").write_text("[]"), "is not a manifest", True),
    "future manifest": (
        lambda folder: (folder / "manifest.json").write_text('{"format": 2, "step": 3, "metric": null, "files": {}}'),
        "has format 2, this version reads 1",
        True,
    ),
    "missing folder": (shutil.rmtree, r"manifest\.json is missing", True),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found_and_the_newest_complete_one_is_named(name, tmp_path, disk):
    damage, message, found_without_hashes = DAMAGES[name]
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        save(store, disk, step)
    damage(tmp_path / "step-000003")
    damage_contents(tmp_path / "step-000002")
    whole = rf"{message}.*step-000001 is complete: write step-000001 into .*latest"
    with pytest.raises(CheckpointError, match=whole):
        store.load()
    if found_without_hashes:
        with pytest.raises(CheckpointError, match=whole):
            store.latest()
    (tmp_path / "latest").write_text("step-000001\n")
    assert is_whole(store.load())


def test_damage_without_an_older_checkpoint_says_so(tmp_path, disk):
    store = CheckpointStore(tmp_path)
    save(store, disk, 1)
    damage_size(tmp_path / "step-000001")
    with pytest.raises(CheckpointError, match="No older checkpoint is complete"):
        store.latest()


def test_a_pointer_that_names_nothing_sensible_is_an_error(tmp_path, disk):
    store = CheckpointStore(tmp_path)
    save(store, disk, 1)
    (tmp_path / "latest").write_bytes(b"\xff../elsewhere")
    with pytest.raises(CheckpointError, match=r"must name a checkpoint.*step-000001 is complete"):
        store.latest()


def test_the_best_is_not_sought_in_damaged_checkpoints(tmp_path, disk):
    store = CheckpointStore(tmp_path)
    save(store, disk, 1, 0.9)
    save(store, disk, 2, 0.5)
    (tmp_path / "step-000001" / "manifest.json").unlink()
    assert store.best().step == 2


@pytest.mark.parametrize("state", [{"a": (1, 2)}, {"a": {1: 2}}, {"a": {"b": [(1,)]}}])
def test_a_state_that_json_would_change_is_refused(state, tmp_path):
    with pytest.raises(TypeError, match="must come back from JSON as it went in"):
        CheckpointStore(tmp_path).save(1, {}, state)
    assert not list(tmp_path.iterdir())


def test_a_state_that_is_not_finite_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        CheckpointStore(tmp_path).save(1, {}, {"mean": float("inf")})


@pytest.mark.parametrize("name", ["../policy", "/policy", "a//b", "state.json", "manifest.json", ".", "a/.."])
def test_a_writer_cannot_leave_its_checkpoint(name, tmp_path):
    with pytest.raises(ValueError, match="plain relative path"):
        CheckpointStore(tmp_path).save(1, {name: write_something}, {})


def test_a_writer_that_wrote_nothing_is_a_bug(tmp_path):
    with pytest.raises(ValueError, match="'policy' of the checkpoint of step 1 wrote nothing"):
        CheckpointStore(tmp_path).save(1, {"policy": lambda path: None}, {})
    assert CheckpointStore(tmp_path).latest() is None
