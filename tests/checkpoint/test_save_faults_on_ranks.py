"""A save of several ranks that is stopped anywhere loses nothing. Two ranks in one process: their effects are in order.

Ranks write files of their own and meet twice, so that this order stands for every other one.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_faults import FaultyDisk, Stopped, contents, is_whole, save
from test_store_faults import SCENARIOS, Scenario, assert_nothing_lost

from proximo.checkpoint import atomic, ranks
from proximo.checkpoint.ranks import Captured, RankWriter, replace_shards
from proximo.checkpoint.reading import read_manifest
from proximo.checkpoint.store import CheckpointStore
from proximo.distributed.world import World, using
from proximo.errors import CheckpointError, RankError

INDEX = "model.safetensors.index.json"


class TwoInOne(World):
    """Rank 0 of two. Where it meets the other one, that does what it has to do first."""

    size = 2
    timeout_seconds = 60.0

    def __init__(self) -> None:
        super().__init__()
        self.other: Callable[[], Any] = lambda: None

    def gather_aside(self, value: Any, *, what: str) -> list[Any]:
        other, self.other = self.other, lambda: value
        return [value, other()]


@pytest.fixture
def world() -> Iterator[TwoInOne]:
    with using(TwoInOne()) as two:
        yield two


@pytest.fixture
def disk(monkeypatch) -> FaultyDisk:
    return FaultyDisk(monkeypatch.setattr)


def save_on_two(store: CheckpointStore, disk: FaultyDisk, world: TwoInOne, step: int, metric: float | None) -> None:
    """What `save` writes, with the policy's weights written by the other rank, and a file of this one beside."""

    def first(path: Path) -> None:
        path.mkdir()
        disk.write(path / "config.json", contents(step)["policy/config.json"])

    def write(path: Path, name: str) -> Path:
        disk.write(path / name, contents(step).get(f"policy/{name}", b"mine"))
        return path / name

    def each(path: Path) -> Path:
        parts = {"policy": lambda path: write(path, "model.safetensors")}
        world.other = lambda: ranks._written(path.parent, parts)
        return write(path, "rank-00000.safetensors")

    def optimizer(path: Path) -> None:
        disk.write(path, contents(step)["optimizer/policy.safetensors"])

    policy = RankWriter(capture=lambda: Captured(first=first, each=each))
    state = {"step": step, "kl_coefficient": step / 3}
    store.save(step, {"policy": policy, "optimizer/policy.safetensors": optimizer}, state, metric=metric)
    store.finish()


def prepare(scenario: Scenario, folder: Path, disk: FaultyDisk, world: TwoInOne) -> int:
    folder.mkdir()
    disk.watch(folder)
    for step, metric in scenario.before:
        save(CheckpointStore(folder, keep_last=scenario.keep_last), disk, step, metric)
    trial = shutil.copytree(folder, folder.with_name("trial"))
    disk.watch(trial)
    store = CheckpointStore(trial, keep_last=scenario.keep_last)
    save_on_two(store, disk, world, scenario.step, scenario.metric)
    assert is_whole(store.load())
    assert {"policy/model.safetensors", "policy/rank-00000.safetensors"} <= store_files(store)
    return len(disk.effects)


def store_files(store: CheckpointStore) -> set[str]:
    return set(read_manifest(store.latest().folder).files)


@pytest.mark.parametrize(
    ("name", "moment"), [("first", "torn"), ("first", "power"), ("new best", "after"), ("new best", "power")]
)
def test_a_save_of_ranks_stopped_at_any_effect_loses_nothing(name, moment, tmp_path, disk, world):
    scenario = SCENARIOS[name]
    num_effects = prepare(scenario, tmp_path / "origin", disk, world)
    assert num_effects > 25
    for stop_at in range(num_effects):
        folder = shutil.copytree(tmp_path / "origin", tmp_path / str(stop_at))
        disk.watch(folder, stop_at=stop_at, moment="after" if moment == "power" else moment)
        with pytest.raises(Stopped):
            save_on_two(
                CheckpointStore(folder, keep_last=scenario.keep_last), disk, world, scenario.step, scenario.metric
            )
        if moment == "power":
            disk.lose_power(folder)
        assert_nothing_lost(scenario, folder, disk)
        shutil.rmtree(folder)


def test_each_rank_has_its_files_on_the_disk_before_the_manifest_is_written(tmp_path, disk, world):
    disk.watch(tmp_path)
    save_on_two(CheckpointStore(tmp_path / "checkpoints"), disk, world, 1, None)
    for file in ("model.safetensors", "rank-00000.safetensors", "config.json"):
        assert disk.effects.index(("sync", file)) < disk.effects.index(("write", "manifest.json"))


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("dead", (RankError, "rank 1 is gone")),
        ("refused", (CheckpointError, r"step 2 could not be written: rank 0: OSError: \[Errno 28\] No space left")),
        ("elsewhere", (CheckpointError, "run.folder must be on a file system that all machines of the run share")),
    ],
)
def test_a_rank_that_does_not_write_leaves_the_checkpoint_before(kind, told, tmp_path, disk, world):
    store = CheckpointStore(tmp_path / "checkpoints")
    save(store, disk, 1)

    def other_rank(path: Path) -> Any:
        match kind:
            case "dead":
                raise RankError("rank 1 is gone")
            case "refused":
                raise OSError(28, "No space left on device")
            case "elsewhere":
                other = path.parent / "model.safetensors"
                other.write_bytes(b"x")
                return other
        return None

    def each(path: Path) -> Path:
        def other() -> Any:
            if kind == "dead":
                other_rank(path)
            report = ranks._written(path.parent, {"policy": other_rank})
            (path.parent / "model.safetensors").unlink(missing_ok=True)
            return report

        world.other = other
        disk.write(path / "rank-00000.safetensors", b"mine")
        return path / "rank-00000.safetensors"

    policy = RankWriter(capture=lambda: Captured(first=Path.mkdir, each=each))
    assert store.save(2, {"policy": policy}, {}) is None
    with pytest.raises(told[0], match=told[1]):
        store.finish()
    store.finish()  # told once
    assert store.latest().step == 1
    world.other = lambda: None
    save(store, disk, 2)
    assert is_whole(store.load(2))


def test_models_are_made_whole_by_effects_of_which_each_may_be_the_last(tmp_path, disk):
    store = CheckpointStore(tmp_path / "origin")

    def sharded(path: Path) -> None:
        (path / "shards").mkdir(parents=True)
        disk.write(path / "config.json", b"{}")
        disk.write(path / "shards" / "rank-00000.safetensors", b"shard")

    def whole(path: Path) -> None:
        path.mkdir()
        for name in ("config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
            disk.write(path / name, name.encode())
        disk.write(path / INDEX, b"{}")

    store.save(1, {"policy": sharded}, {}, metric=0.5)
    for moment in ("torn", "after", "power"):
        for stop_at in range(1000):
            folder = shutil.copytree(tmp_path / "origin", tmp_path / f"{moment}{stop_at}")
            disk.watch(folder, stop_at=stop_at, moment="after" if moment == "power" else moment)
            step = folder / "step-000001"
            try:
                replace_shards(step, "policy", "shards", whole)
            except Stopped:
                if moment == "power":
                    disk.lose_power(folder)
            else:
                break
            found = CheckpointStore(folder).load()
            assert found.metric == 0.5
            listed = {name for name in read_manifest(step).files if name.startswith("policy/")}
            assert ("policy/shards/rank-00000.safetensors" in listed) != (
                "policy/model.safetensors.index.json" in listed
            )
            index = step / "policy" / INDEX
            assert not index.exists() or len(list(index.parent.glob("model-*"))) == 2
            disk.watch(folder)
            if (step / "policy" / "shards").is_dir():
                replace_shards(step, "policy", "shards", whole)
            CheckpointStore(folder).load()
            assert not list(step.rglob(f"{atomic.TEMPORARY_PREFIX}*")) or not (step / "policy" / "shards").exists()
        assert stop_at > 15
        assert set(read_manifest(step).files) == {
            "policy/config.json",
            "policy/model-00001-of-00002.safetensors",
            "policy/model-00002-of-00002.safetensors",
            f"policy/{INDEX}",
            "state.json",
        }
        assert (step / "policy" / "config.json").read_bytes() == b"{}"
