"""Who may start or go on in a folder, and what is kept."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from proximo.checkpoint.run_folder import check_run, described_run, is_run_folder, open_run
from proximo.checkpoint.store import CheckpointStore
from proximo.errors import RunFolderError


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def make_absent(folder: Path) -> None:
    pass


def make_empty(folder: Path) -> None:
    folder.mkdir()


def make_foreign(folder: Path) -> None:
    folder.mkdir()
    (folder / "thesis.tex").write_text("mine")
    (folder / "checkpoints").mkdir()


def make_file(folder: Path) -> None:
    folder.write_text("a file")


def make_opened(folder: Path) -> None:
    """A run that failed before its first step."""
    with open_run(folder) as run:
        run.write_config("a: 1\n", {"a": 1})
        (folder / "log.txt").write_text("an error\n")


def make_logged(folder: Path) -> None:
    """A run that died before its first checkpoint."""
    make_opened(folder)
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')


def make_saved(folder: Path) -> None:
    make_logged(folder)
    CheckpointStore(folder / "checkpoints").save(1, {}, {"step": 1})
    (folder / "notes.txt").write_text("the user's own")


def make_copied(folder: Path) -> None:
    """As `cp -r run/* there/` does, without the files whose names begin with a dot."""
    make_saved(folder)
    (folder / ".proximo-run").unlink()


def make_copied_log(folder: Path) -> None:
    """The same of a run that had no checkpoint yet."""
    with open_run(folder) as run:
        run.write_config("", {"run": {"folder": "runs/x"}})
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    (folder / ".proximo-run").unlink()


def make_lookalike(folder: Path) -> None:
    """Names as a run has them, and nothing that a run wrote."""
    folder.mkdir()
    (folder / "checkpoints" / "step-000001").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')


def make_finished(folder: Path) -> None:
    make_saved(folder)
    with open_run(folder, resume="must") as run:
        run.write_outcome("finished", total_steps=1)


STARTS, RESUMES = "starts", "resumes"
RULES = {
    make_absent: {"never": STARTS, "must": "no run to resume", "auto": STARTS, "overwrite": STARTS},
    make_empty: {"never": STARTS, "must": "no run to resume", "auto": STARTS, "overwrite": STARTS},
    make_foreign: dict.fromkeys(("never", "must", "auto", "overwrite"), "holds no run"),
    make_file: dict.fromkeys(("never", "must", "auto", "overwrite"), "is a file"),
    make_opened: {"never": STARTS, "must": "no checkpoint yet", "auto": STARTS, "overwrite": STARTS},
    make_logged: {"never": "already holds a run", "must": "no checkpoint yet", "auto": STARTS, "overwrite": STARTS},
    make_copied: {"never": "already holds a run", "must": RESUMES, "auto": RESUMES, "overwrite": STARTS},
    make_copied_log: {"never": "already holds a run", "must": "no checkpoint yet", "auto": STARTS, "overwrite": STARTS},
    make_lookalike: dict.fromkeys(("never", "must", "auto", "overwrite"), "holds no run"),
    make_saved: {"never": "already holds a run", "must": RESUMES, "auto": RESUMES, "overwrite": STARTS},
}
ADVICE = {
    make_opened: ("holds a run that took no step", {"never"}),
    make_logged: ("holds a run without a checkpoint", {"auto", "overwrite"}),
    make_saved: ("holds a run at step 1", {"must", "overwrite"}),
    make_finished: ("holds a finished run of 1 step", {"auto", "overwrite"}),
}
"""Folder -> its description, and the starts that the description advises."""
OPTIONS = {"must": r"--resume(?!=)", "auto": "--resume=auto", "overwrite": "--overwrite"}


@pytest.mark.parametrize("make", ADVICE)
def test_the_description_of_a_folder_advises_what_is_then_allowed(make, tmp_path):
    make(tmp_path / "run")
    described, (words, advised) = described_run(tmp_path / "run"), ADVICE[make]
    assert described.startswith(words)
    assert {name for name, option in OPTIONS.items() if re.search(option, described)} == advised - {"never"}
    if "never" in advised:
        check_run(tmp_path / "run", resume="never", overwrite=False)
        return
    with pytest.raises(RunFolderError, match=re.escape(described)):
        check_run(tmp_path / "run", resume="never", overwrite=False)


@pytest.mark.parametrize("request_", ["never", "must", "auto", "overwrite"])
@pytest.mark.parametrize("make", RULES)
def test_the_rules_for_a_folder_that_may_exist(make, request_, tmp_path):
    folder = tmp_path / "runs" / "name"
    folder.parent.mkdir()
    make(folder)
    before, earlier = snapshot(tmp_path), snapshot(folder)
    options = {"overwrite": True} if request_ == "overwrite" else {"resume": request_}
    outcome = RULES[make][request_]
    if outcome not in (STARTS, RESUMES):
        with pytest.raises(RunFolderError, match=outcome):
            open_run(folder, **options)
        assert snapshot(tmp_path) == before
        return
    with open_run(folder, **options) as run:
        assert run.resuming == (outcome == RESUMES)
        assert is_run_folder(folder)
    if outcome == RESUMES:
        marker = str(folder / ".proximo-run")
        assert snapshot(tmp_path) | {marker: b""} == before | {marker: b""}
    else:
        assert not any((folder / name).exists() for name in ("metrics.jsonl", "samples.jsonl", "checkpoints"))
    aside = folder.with_name("name.replaced-1")
    assert aside.exists() == (outcome == STARTS and make not in (make_absent, make_empty, make_opened))
    if aside.exists():
        moved = {path.replace(str(aside), str(folder)): content for path, content in snapshot(aside).items()}
        marker = str(folder / ".proximo-run")
        assert moved | {marker: b""} == earlier | {marker: b""}


def test_each_run_that_is_moved_aside_gets_a_name_of_its_own(tmp_path):
    for number in range(3):
        with open_run(tmp_path / "run", overwrite=number > 0) as run:
            assert run.replaced == (tmp_path / f"run.replaced-{number}" if number else None)
            (run.path / "metrics.jsonl").write_text(f"{number}\n")
    assert [(tmp_path / f"run.replaced-{number}" / "metrics.jsonl").read_text() for number in (1, 2)] == ["0\n", "1\n"]


def test_a_link_keeps_its_place_and_what_it_names_is_moved_aside(tmp_path):
    make_saved(tmp_path / "disk" / "big")
    (tmp_path / "run").symlink_to(tmp_path / "disk" / "big")
    with open_run(tmp_path / "run", overwrite=True) as run:
        assert run.replaced == tmp_path / "disk" / "big.replaced-1"
        assert (tmp_path / "run").is_symlink()
        assert is_run_folder(tmp_path / "disk" / "big")
    assert (tmp_path / "disk" / "big.replaced-1" / "notes.txt").read_text() == "the user's own"


@pytest.mark.parametrize("options", [{"overwrite": True}, {"resume": "auto"}])
def test_a_folder_that_may_not_be_renamed_is_refused_before_anything_is_loaded(options, tmp_path, monkeypatch):
    """The tests may run as root, whom no mode refuses."""
    make_logged(tmp_path / "run")
    before = snapshot(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(RunFolderError, match="cannot be moved aside: the permissions of .* refuse it"):
        check_run(tmp_path / "run", **{"resume": "never", "overwrite": False} | options)
    assert snapshot(tmp_path) == before


def test_a_folder_that_cannot_be_renamed_is_left_as_it_is(tmp_path, monkeypatch):
    make_saved(tmp_path / "run")
    before = snapshot(tmp_path / "run" / "checkpoints")
    monkeypatch.setattr("proximo.checkpoint.atomic._rename", lambda *_: (_ for _ in ()).throw(OSError("busy")))
    with pytest.raises(RunFolderError, match=r"run cannot be moved to .*run.replaced-1 .*busy; give another folder"):
        open_run(tmp_path / "run", overwrite=True)
    assert snapshot(tmp_path / "run" / "checkpoints") == before


def test_resuming_and_overwriting_contradict_each_other(tmp_path):
    make_saved(tmp_path / "run")
    before = snapshot(tmp_path)
    with pytest.raises(RunFolderError, match="choose one"):
        open_run(tmp_path / "run", resume="auto", overwrite=True)
    assert snapshot(tmp_path) == before


def test_a_run_folder_keeps_what_it_was_given(tmp_path):
    with open_run(tmp_path / "run") as run:
        run.write_config("ppo:\n  epochs: 2\n", {"ppo": {"epochs": 2, "clip": None}})
        run.write_environment({"torch": "2.13"})
        run.write_outcome("failed", total_steps=5, reason="no judge")
    assert (tmp_path / "run" / "config.yaml").read_text() == "ppo:\n  epochs: 2\n"
    resolved = json.loads((tmp_path / "run" / "config.resolved.json").read_text())
    assert resolved == {"ppo": {"epochs": 2, "clip": None}}
    assert json.loads((tmp_path / "run" / "environment.json").read_text()) == {"torch": "2.13"}
    outcome = json.loads((tmp_path / "run" / "outcome.json").read_text())
    assert outcome == {"state": "failed", "total_steps": 5, "reason": "no judge"}


HOLD = """
import os, sys, time
from pathlib import Path
from proximo.checkpoint.run_folder import open_run
run = open_run(Path(sys.argv[1]), resume="auto")
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(60)
"""


def test_a_second_process_is_kept_out_until_the_first_dies_even_if_children_of_it_live(tmp_path):
    folder = tmp_path / "run"
    make_saved(folder)
    before = snapshot(folder / "checkpoints")
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    with holder:
        grandchild = int(holder.stdout.readline())
        try:
            for options in ({"resume": "must"}, {"resume": "auto"}, {"overwrite": True}):
                with pytest.raises(
                    RunFolderError, match=rf"another process \(process {holder.pid} on .*is training in"
                ):
                    open_run(folder, **options)
            assert snapshot(folder / "checkpoints") == before
            holder.kill()
            holder.wait()
            with open_run(folder, resume="must") as run:
                assert run.resuming
        finally:
            holder.kill()
            os.kill(grandchild, signal.SIGKILL)


def test_rules_and_stores_are_known_without_torch():
    """Mistakes in a command are reported before torch is imported."""
    code = "import sys, proximo.checkpoint.run_folder, proximo.checkpoint.logs, proximo.distributed.signals; "
    code += "import proximo.checkpoint.fingerprints; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
