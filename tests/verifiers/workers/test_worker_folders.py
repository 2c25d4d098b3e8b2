"""The folders of workers: gone with their process, however it ended, and nobody else's touched."""

import fcntl
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from proximo_verifiers.workers import process
from proximo_verifiers.workers.process import PREFIX, WorkerFolder, sweep_folders
from waiting import LATEST_SECONDS

HOLDS_ONE = (
    "from proximo_verifiers.workers.process import WorkerFolder; print(WorkerFolder().path, flush=True); input()"
)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_goes_when_its_process_was_killed_and_not_before(place: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(place)}
    command = [sys.executable, "-c", HOLDS_ONE]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        (folder / "left").write_text("x", encoding="utf-8")
        sweep_folders()
        assert (folder / "left").is_file(), "its process lives"
        process.kill()
    sweep_folders()
    assert not folder.exists()


def test_a_folder_that_another_process_is_sweeping_away_is_not_waited_for(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, free = place / f"{PREFIX}taken", place / f"{PREFIX}free"
    taken.mkdir()
    free.mkdir()
    names = iter([str(taken), str(free)])
    monkeypatch.setattr(tempfile, "mkdtemp", lambda prefix: next(names))
    other = os.open(taken, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    made: list[str] = []
    thread = threading.Thread(target=lambda: made.append(WorkerFolder().path), daemon=True)
    thread.start()
    thread.join(LATEST_SECONDS)
    os.close(other)
    assert made == [str(free)]


def test_ones_own_folder_stays_until_it_is_removed() -> None:
    own = WorkerFolder()
    sweep_folders()
    assert Path(own.path).is_dir()
    assert Path(own.path).stat().st_mode & 0o777 == 0o711
    own.remove()
    assert not Path(own.path).exists()


def test_what_is_no_folder_of_ours_stays(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = place / "elsewhere"
    elsewhere.mkdir()
    (place / f"{PREFIX}link").symlink_to(elsewhere)
    (place / f"{PREFIX}file").write_text("x", encoding="utf-8")
    (place / "another").mkdir()
    sweep_folders()
    assert len(list(place.iterdir())) == 4
    (place / f"{PREFIX}of-another-user").mkdir()
    monkeypatch.setattr(process.os, "geteuid", lambda: os.getuid() + 1)
    sweep_folders()
    assert (place / f"{PREFIX}of-another-user").is_dir()


def test_a_folder_that_was_swept_before_it_was_locked_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    lock = process.fcntl.flock

    def lock_late(descriptor: int, how: int) -> None:
        made.append("")
        if len(made) == 1:
            (found,) = Path(tempfile.gettempdir()).iterdir()
            found.rmdir()
        lock(descriptor, how)

    monkeypatch.setattr(process.fcntl, "flock", lock_late)
    own = WorkerFolder()
    assert len(made) == 2
    assert Path(own.path).is_dir()
    own.remove()
