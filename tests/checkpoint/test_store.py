"""What a checkpoint store keeps, verifies and refuses."""

import json
import shutil
from pathlib import Path

import pytest
from checkpoint_faults import FaultyDisk, is_whole, save

from proximo.algorithms.advantages import RunningMoments
from proximo.checkpoint.reading import FORMAT, DamagedError, as_record, read_manifest
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


@pytest.mark.parametrize("earlier", [0.5, None], ids=["an earlier one was measured", "none was"])
def test_the_best_of_the_steps_that_were_given_up_goes_with_them(earlier, tmp_path):
    store = CheckpointStore(tmp_path)
    for step, metric in ((1, earlier), (2, 0.1), (3, 0.9)):
        store.save(step, {}, {}, metric=metric)
    (tmp_path / "latest").write_text("step-000001\n")
    store.save(2, {}, {"again": True})
    assert store.steps() == (1, 2)
    best = store.best()
    assert (best and best.step) == (1 if earlier else None)
    assert (tmp_path / "best").is_file() == bool(earlier)


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
    "manifest without its hash": (
        lambda folder: (folder / "manifest.json").write_text(
            f'{{"format": {FORMAT}, "step": 3, "metric": null, "files": {{}}}}'
        ),
        "has no hash of its content",
        True,
    ),
    "missing folder": (shutil.rmtree, r"manifest\.json is missing", True),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found_and_the_way_on_is_named(name, tmp_path, disk):
    damage, message, found_without_hashes = DAMAGES[name]
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        save(store, disk, step)
    damage(tmp_path / "step-000003")
    whole = rf"{message}.*To continue from another one, write its name into .*latest"
    with pytest.raises(CheckpointError, match=whole):
        store.load()
    if found_without_hashes:
        with pytest.raises(CheckpointError, match=whole):
            store.latest()
    (tmp_path / "latest").write_text("step-000001\n")
    assert is_whole(store.load())


def test_a_pointer_that_names_nothing_sensible_is_an_error(tmp_path, disk):
    store = CheckpointStore(tmp_path)
    save(store, disk, 1)
    (tmp_path / "latest").write_bytes(b"\xff../elsewhere")
    with pytest.raises(CheckpointError, match=r"must name a checkpoint.*write its name into"):
        store.latest()


@pytest.mark.parametrize("state", [{"a": (1, 2)}, {"a": {1: 2}}, {"a": {"b": [(1,)]}}])
def test_a_state_that_json_would_change_is_refused(state, tmp_path):
    with pytest.raises(TypeError, match="must come back from JSON as it went in"):
        CheckpointStore(tmp_path).save(1, {}, state)
    assert not list(tmp_path.iterdir())


def test_a_state_that_is_not_finite_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        CheckpointStore(tmp_path).save(1, {}, {"mean": float("inf")})


def test_a_writer_that_wrote_nothing_is_a_bug(tmp_path):
    with pytest.raises(ValueError, match="'policy' of the checkpoint of step 1 wrote nothing"):
        CheckpointStore(tmp_path).save(1, {"policy": lambda path: None}, {})
    assert CheckpointStore(tmp_path).latest() is None


@pytest.mark.parametrize("number", [FORMAT - 1, FORMAT + 1])
def test_another_format_is_refused_with_the_version_that_reads_it(number, tmp_path, disk, monkeypatch):
    store = CheckpointStore(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("proximo.checkpoint.reading.FORMAT", number)
        patch.setattr("proximo.checkpoint.reading.installed_version", lambda package: "7.5")
        save(store, disk, 1)
    for read in (store.load, store.latest, store.newest_whole):
        with pytest.raises(CheckpointError, match=rf"cannot be read: .*format {number}, .* saved it \(7\.5\)$"):
            read()


def test_another_format_among_others_is_named_kept_and_hides_none_of_them(tmp_path, disk, monkeypatch, caplog):
    store = CheckpointStore(tmp_path, keep_last=1)
    with monkeypatch.context() as patch:
        patch.setattr("proximo.checkpoint.reading.FORMAT", FORMAT - 1)
        save(store, disk, 1, 0.9)
    with pytest.raises(CheckpointError, match="format"):
        store.best()
    for step, metric in ((2, 0.5), (3, 0.4), (4, 0.3)):
        save(store, disk, step, metric)  # a run that trains goes on
    assert store.steps() == (1, 2, 4)
    assert not caplog.messages
    assert store.best().step == 2
    assert [str(tmp_path / "step-000001") in said for said in caplog.messages] == [True]


def test_every_bit_of_a_manifest_counts(tmp_path, disk):
    """Each of the eight in turn. A digit becomes another digit, a space a letter; it still is a manifest by form."""
    store = CheckpointStore(tmp_path)
    save(store, disk, 1)
    save(store, disk, 2, 0.25)
    path = tmp_path / "step-000002" / "manifest.json"
    whole = path.read_bytes()
    for bit in range(0, 8 * len(whole), 13):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        with pytest.raises(DamagedError, match=r"manifest\.json"):
            read_manifest(path.parent)
    with pytest.raises(CheckpointError, match=r"is not complete: .*manifest\.json"):
        store.latest()
    path.write_bytes(whole)
    assert is_whole(store.load())


def test_a_checkpoint_under_the_name_of_another_step_is_refused(tmp_path, disk):
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        save(store, disk, step)
    (tmp_path / "step-000002").rename(tmp_path / "step-000003")
    (tmp_path / "latest").write_text("step-000003\n")
    with pytest.raises(CheckpointError, match=r"holds the checkpoint of step 2.*write its name"):
        store.load()


def test_the_hashes_of_some_parts_alone(tmp_path, disk):
    store = CheckpointStore(tmp_path)
    save(store, disk, 1)
    damage_contents(tmp_path / "step-000001")
    assert store.load(parts=("optimizer",)).step == 1
    assert store.load(parts=("pol",)).step == 1
    for parts in (("policy",), ("policy/model.safetensors",), None):
        with pytest.raises(CheckpointError, match=r"model\.safetensors has other contents"):
            store.load(parts=parts)
    save(store, disk, 2)
    state = tmp_path / "step-000002" / "state.json"
    state.write_bytes(state.read_bytes().replace(b"2", b"3"))
    with pytest.raises(CheckpointError, match=r"state\.json has other contents"):
        store.load(parts=())


def test_the_best_is_not_told_where_a_manifest_is_damaged(tmp_path, disk):
    store = CheckpointStore(tmp_path)
    for step, metric in ((1, 0.9), (2, 0.5)):
        save(store, disk, step, metric)
    (tmp_path / "step-000001" / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"Remove .*step-000001 to choose among the others"):
        store.best()
    save(store, disk, 3, 0.1)  # a run that trains goes on
    assert (tmp_path / "best").read_text() == "step-000002\n"
    shutil.rmtree(tmp_path / "step-000001")
    assert store.best().step == 2


def test_state_of_another_version_is_refused_by_name_and_not_by_a_key_error(tmp_path):
    CheckpointStore(tmp_path).save(1, {}, {"moments": {"mean": 1.0}})
    state = CheckpointStore(tmp_path).load().state
    with pytest.raises(CheckpointError, match=r"has no 'scale': another version of Proximo saved it"):
        state["scale"]
    with pytest.raises(CheckpointError, match=r"has no 'count'"):
        state["moments"]["count"]
    assert as_record(RunningMoments, state["moments"]) == RunningMoments(mean=1.0)
    for saved in ({"average": 1.0}, {"mean": 1.0, "average": 1.0}):
        with pytest.raises(CheckpointError, match=r"does not fit .*average.*another version"):
            as_record(RunningMoments, saved)
