"""A save that is stopped anywhere loses nothing: within and after every effect on the disk, and by power failure."""

import errno
import os
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import checkpoint_faults
import numpy as np
import pytest
from checkpoint_faults import FaultyDisk, Stopped, is_whole, save
from safetensors import SafetensorError
from safetensors.numpy import save_file

from proximo.checkpoint import atomic
from proximo.checkpoint.store import CheckpointStore
from proximo.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Checkpoints that are there, as (step, metric), and the save that is stopped."""

    before: tuple[tuple[int, float | None], ...]
    step: int
    metric: float | None
    keep_last: int | None


SCENARIOS = {
    "first": Scenario(before=(), step=1, metric=None, keep_last=2),
    "later": Scenario(before=((1, None), (2, None)), step=3, metric=None, keep_last=None),
    "pruning": Scenario(before=((1, None), (2, None)), step=3, metric=None, keep_last=1),
    "old best": Scenario(before=((1, 0.9), (2, 0.1)), step=3, metric=0.5, keep_last=1),
    "new best": Scenario(before=((1, 0.5), (2, 0.1)), step=3, metric=0.9, keep_last=1),
}


@pytest.fixture
def disk(monkeypatch) -> FaultyDisk:
    return FaultyDisk(monkeypatch.setattr)


def prepare(scenario: Scenario, folder: Path, disk: FaultyDisk) -> int:
    """Make the folder before the save; gives the number of effects of the save when nothing stops it."""
    store = CheckpointStore(folder, keep_last=scenario.keep_last)
    folder.mkdir()
    disk.watch(folder)
    for step, metric in scenario.before:
        save(store, disk, step, metric)
    trial = folder.with_name("trial")
    shutil.copytree(folder, trial)
    disk.watch(trial)
    save(CheckpointStore(trial, keep_last=scenario.keep_last), disk, scenario.step, scenario.metric)
    return len(disk.effects)


def assert_nothing_lost(scenario: Scenario, folder: Path, disk: FaultyDisk) -> None:
    """A complete checkpoint is the latest, every other is complete too, the step and the next can be saved."""
    disk.watch(folder)
    store = CheckpointStore(folder, keep_last=scenario.keep_last)
    last_before = scenario.before[-1][0] if scenario.before else None
    latest = store.latest()
    assert (latest.step if latest else None) in (last_before, scenario.step)
    assert all(is_whole(store.load(step)) for step in store.steps())
    if latest is None or latest.step != scenario.step:
        save(store, disk, scenario.step, scenario.metric)
    best_metric = max((metric for _, metric in scenario.before if metric is not None), default=scenario.metric)
    best = store.best()
    assert (best.metric if best else None) == (max(best_metric, scenario.metric) if best_metric else None)
    save(store, disk, scenario.step + 1, 0.0)
    assert is_whole(store.load())
    kept = store.steps() if scenario.keep_last is None else store.steps()[-scenario.keep_last :]
    assert set(store.steps()) - set(kept) <= {store.best().step}
    assert not list(folder.glob(f"{atomic.TEMPORARY_PREFIX}*"))


@pytest.mark.parametrize("moment", ["torn", "after", "power"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_save_stopped_at_any_effect_loses_nothing(name, moment, tmp_path, disk):
    scenario = SCENARIOS[name]
    num_effects = prepare(scenario, tmp_path / "origin", disk)
    assert num_effects > 10
    for stop_at in range(num_effects):
        folder = tmp_path / str(stop_at)
        shutil.copytree(tmp_path / "origin", folder)
        disk.watch(folder, stop_at=stop_at, moment="after" if moment == "power" else moment)
        with pytest.raises(Stopped):
            save(CheckpointStore(folder, keep_last=scenario.keep_last), disk, scenario.step, scenario.metric)
        if moment == "power":
            disk.lose_power(folder)
        assert_nothing_lost(scenario, folder, disk)
        shutil.rmtree(folder)


def test_a_second_stop_while_the_step_is_saved_again_loses_nothing(tmp_path, disk):
    """The first stop published the folder, so that the second save has to replace it."""
    scenario = SCENARIOS["new best"]
    prepare(scenario, tmp_path / "origin", disk)
    disk.watch(tmp_path / "origin")
    names = [("rename", "step-000003"), ("sync", "origin")]
    save(CheckpointStore(shutil.copytree(tmp_path / "origin", tmp_path / "copy")), disk, 3, 0.9)
    published = disk.effects.index(names[0]) + 1
    disk.watch(tmp_path / "origin", stop_at=published, moment="after")
    with pytest.raises(Stopped):
        save(CheckpointStore(tmp_path / "origin", keep_last=1), disk, 3, 0.9)
    assert (tmp_path / "origin" / "step-000003").is_dir()

    for stop_at in range(1000):
        folder = shutil.copytree(tmp_path / "origin", tmp_path / f"again{stop_at}")
        disk.watch(folder, stop_at=stop_at, moment="after")
        try:
            save(CheckpointStore(folder, keep_last=1), disk, 3, 0.9)
            break
        except Stopped:
            assert_nothing_lost(scenario, folder, disk)
    assert stop_at > 30


def test_a_full_disk_is_one_error_and_the_run_can_save_again(tmp_path, monkeypatch):
    def refuse() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    disk = FaultyDisk(monkeypatch.setattr, stop=refuse)
    num_effects = prepare(SCENARIOS["pruning"], tmp_path / "origin", disk)
    for stop_at in range(num_effects):
        folder = shutil.copytree(tmp_path / "origin", tmp_path / str(stop_at))
        disk.watch(folder, stop_at=stop_at, moment="torn")
        with pytest.raises(
            CheckpointError, match=r"step 3 could not be written.*No space left.*are untouched.*--resume"
        ):
            save(CheckpointStore(folder, keep_last=1), disk, 3)
        assert_nothing_lost(SCENARIOS["pruning"], folder, disk)


def test_what_safetensors_says_of_a_full_disk_is_the_same_error(tmp_path):
    def refuse(path: Path) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with pytest.raises(CheckpointError, match=r"step 1 could not be written.*No space left.*--resume=auto"):
        CheckpointStore(tmp_path, keep_last=1).save(1, {"policy": refuse}, {})
    assert CheckpointStore(tmp_path, keep_last=1).latest() is None


def test_a_process_that_dies_in_a_save_loses_nothing(tmp_path, disk):
    scenario = SCENARIOS["pruning"]
    num_effects = prepare(scenario, tmp_path / "origin", disk)
    for stop_at, moment in ((4, "torn"), (num_effects - 5, "after")):
        folder = shutil.copytree(tmp_path / "origin", tmp_path / str(stop_at))
        code = "import sys, checkpoint_faults; checkpoint_faults.main(*sys.argv[1:])"
        child = subprocess.run(
            [sys.executable, "-c", code, str(folder), "3", str(stop_at), moment],
            env=os.environ | {"PYTHONPATH": os.pathsep.join((str(Path(checkpoint_faults.__file__).parent), *sys.path))},
            check=False,
        )
        assert child.returncode == 9
        store = CheckpointStore(folder, keep_last=1)
        assert is_whole(store.load())
        assert all(is_whole(store.load(step)) for step in store.steps())
        save(store, disk, 4)
        assert store.steps()[-1] == 4


def test_everything_is_on_disk_before_the_name_is_given_and_the_name_before_the_pointer(tmp_path, disk):
    store = CheckpointStore(tmp_path / "checkpoints")
    save(store, disk, 1)
    disk.watch(tmp_path)
    save(store, disk, 2)
    named = disk.effects.index(("rename", "step-000002"))
    for file in ("model.safetensors", "config.json", "policy.safetensors", "state.json", "manifest.json"):
        assert disk.effects.index(("write", file)) < disk.effects.index(("sync", file)) < named
    contents_synced = max(index for index, effect in enumerate(disk.effects) if effect == ("sync", "state.json"))
    assert contents_synced < disk.effects.index(("write", "manifest.json"))
    assert disk.effects[named + 1] == ("sync", "checkpoints")
    assert disk.effects[named + 2 :] == [
        ("write", ".partial-new-latest"),
        ("sync", ".partial-new-latest"),
        ("rename", "latest"),
        ("sync", "checkpoints"),
    ]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_what_a_library_wrote_for_its_owner_alone_gets_the_mode_that_the_umask_leaves(umask, mode, tmp_path):
    def write(path):
        path.mkdir()
        save_file({"weight": np.zeros(3)}, path / "model.safetensors")
        (path / "config.json").write_text("{}")

    before = os.umask(umask)
    try:
        saved = CheckpointStore(tmp_path / "checkpoints").save(1, {"policy": write}, {})
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()]
    assert len(files) == 5
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in files} == {path.name: mode for path in files}
    assert stat.S_IMODE(saved.folder.stat().st_mode) == 0o777 & ~umask


def test_syncing_means_fsync_for_files_and_folders(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("os.fsync", lambda descriptor: synced.append(Path(f"/proc/self/fd/{descriptor}").readlink()))
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("needs /proc to tell which file a descriptor belongs to")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "file").write_bytes(b"x")
    atomic.fsync_tree(tmp_path)
    assert synced == [tmp_path / "inner" / "file", tmp_path / "inner", tmp_path]
