"""A run that is to be replaced is lost only to one that took a step, wherever the process dies."""

from pathlib import Path

import pytest
from checkpoint_faults import FaultyDisk, Stopped

from proximo.checkpoint import atomic, run_folder
from proximo.checkpoint.earlier_run import FAILED_START, kept_aside
from proximo.checkpoint.run_folder import MARKER, open_run, settle_run, steps_of_run
from proximo.checkpoint.store import CheckpointStore

OLD = {"metrics.jsonl": b'{"step": 1}\n', "log.txt": b"old\n"}


def make_finished(folder: Path) -> None:
    with open_run(folder):
        CheckpointStore(folder / "checkpoints").save(1, {}, {"step": 1})
        for name, data in OLD.items():
            (folder / name).write_bytes(data)


def files(folder: Path) -> dict[str, bytes]:
    """Of the run in a folder: not its lock, nor what a failed start left."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {
        name: path.read_bytes()
        for name, path in found.items()
        if name != MARKER and not name.startswith(f"{FAILED_START}/")
    }


def replace(folder: Path) -> None:
    """Up to the first step of the new run; the process ends without closing the folder."""
    run = open_run(folder, overwrite=True)
    with pytest.MonkeyPatch.context() as patch, run:
        patch.setattr(run_folder, "put_back", lambda *_: None)
        run.metrics.write_bytes(b'{"step": 0}\n')
        run.metrics.write_bytes(b'{"step": 0}\n{"step": 1}\n')
        run.has_begun()


@pytest.mark.parametrize("moment", ["before", "torn", "after"])
def test_a_death_at_any_effect_leaves_the_old_run_or_the_new_one_that_took_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    make_finished(tmp_path / "whole")
    old = files(tmp_path / "whole")
    disk = FaultyDisk(monkeypatch.setattr)
    disk.watch(tmp_path / "whole")
    replace(tmp_path / "whole")
    new = {"metrics.jsonl": b'{"step": 0}\n{"step": 1}\n'}
    assert files(tmp_path / "whole") == new
    outcomes = set()
    effects = len(disk.effects)
    for stop_at in range(effects):
        for stop_again in range(40):
            folder = tmp_path / f"{stop_at}-{stop_again}"
            make_finished(folder)
            disk.watch(folder, stop_at=stop_at, moment=moment)
            with pytest.raises(Stopped):
                replace(folder)
            disk.watch(folder, stop_at=stop_again, moment=moment)
            died = True
            try:  # the process that puts it back dies as well
                settle_run(folder)
                died = False
            except Stopped:
                pass
            disk.watch(folder)
            began = not kept_aside(folder) and files(folder).get("metrics.jsonl") == new["metrics.jsonl"]
            steps = steps_of_run(folder)
            settle_run(folder)
            left = {name: data for name, data in files(folder).items() if not name.startswith(".partial-")}
            assert left == (new if began else old), (stop_at, stop_again)
            assert steps == (() if began else (1,)), (stop_at, stop_again)
            outcomes.add(began)
            if not died:
                break
    assert outcomes == {False, True}


def test_whoever_opens_the_folder_next_finds_the_old_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_finished(tmp_path / "run")
    old = files(tmp_path / "run")
    monkeypatch.setattr(atomic, "remove", lambda _: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        replace(tmp_path / "run")
    monkeypatch.undo()
    with open_run(tmp_path / "run", resume="must") as run:
        assert run.resuming
        assert files(tmp_path / "run") == old
