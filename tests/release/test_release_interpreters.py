"""What `make release-check` leaves out is named with its reason: interpreters, and torch that would be gigabytes."""

import sys
from pathlib import Path

import pytest
from interpreters import MODULES, interpreters, why_not_installed
from running import Deadline, Failed, run


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def test_an_interpreter_that_runs_is_taken() -> None:
    found, left_out = interpreters([sys.executable])
    assert found == [Path(sys.executable)]
    assert left_out == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("echo 3.10", "is Python 3.10, and 3.11 or 3.12 or 3.13 or 3.14 is supported"),
        ("echo No module named _lzma >&2; exit 1", "does not run: No module named _lzma"),
    ],
)
def test_one_that_is_too_old_or_lacks_a_module_is_left_out_with_the_reason(text: str, why: str, tmp_path: Path) -> None:
    python = script(tmp_path / "python", text)
    found, (item,) = interpreters([str(python)])
    assert found == []
    assert item.what == f"Python {python}"
    assert item.why == f"{python} {why}"


def test_a_supported_version_that_is_nowhere_is_left_out_and_one_of_pyenv_is_found(tmp_path: Path, monkeypatch) -> None:
    script(tmp_path / "uv", "exit 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    folder = tmp_path / "versions" / "3.12.9" / "bin"
    folder.mkdir(parents=True)
    asked = script(folder / "python", 'echo "$2" > "$0.asked"; echo 3.12')
    found, left_out = interpreters([])
    assert found == [asked]
    assert [item.what for item in left_out] == ["Python 3.11", "Python 3.13", "Python 3.14"]
    assert all("PYTHONS=" in item.why for item in left_out)
    imported = (folder / "python.asked").read_text(encoding="utf-8")
    assert all(name in imported for name in MODULES)


CUDA = ["torch==2.13.0", "nvidia-nccl-cu13==2.28.9", "numpy==2.0.0"]


@pytest.mark.parametrize(
    ("pins", "says", "why"),
    [
        (["torch==2.13.0+cpu", "numpy==2.0.0"], "exit 9", None),
        (CUDA, "echo Would install 2 packages >&2", None),
        (CUDA, "echo Would download 2 packages >&2", "torch==2.13.0 with CUDA is not on this machine"),
        (CUDA, "exit 1", "TORCH=any downloads gigabytes"),
    ],
)
def test_torch_with_cuda_is_not_downloaded_unasked(pins, says, why, tmp_path: Path, monkeypatch) -> None:
    script(tmp_path / "uv", f'echo "$@" > {tmp_path}/asked; {says}')
    monkeypatch.setenv("PATH", str(tmp_path))
    found = why_not_installed(pins, python=Path("python"), deadline=Deadline(60))
    assert (found is None) if why is None else (why in found)
    if pins is CUDA:
        assert (tmp_path / "asked").read_text(encoding="utf-8").split()[-2:] == CUDA[:2]


def test_a_command_ends_at_the_deadline_that_it_shares(tmp_path: Path) -> None:
    deadline = Deadline(0.2)
    for _ in range(2):
        with pytest.raises(Failed, match="was not done when the time for this combination was over"):
            run(["sleep", "60"], cwd=tmp_path, deadline=deadline)
    assert deadline.seconds_left == 0
