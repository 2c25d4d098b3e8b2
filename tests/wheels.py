"""Wheels of the project: built offline, and installed alone in an empty environment."""

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command in a clean environment: no path of this one leads into it."""
    known = {key: value for key, value in os.environ.items() if key in ("PATH", "HOME", "OMP_NUM_THREADS")}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=known, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_wheel(project: Path, folder: Path) -> Path:
    """The wheel of a folder with a pyproject.toml."""
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=project)
    (built,) = folder.glob("*.whl")
    return built


def install_alone(wheel: Path, folder: Path) -> None:
    """Makes a new environment that has the wheel and nothing else."""
    venv.create(folder, with_pip=False, symlinks=True)
    pip = ("-m", "pip", "--disable-pip-version-check", "--python", folder / "bin" / "python")
    run(sys.executable, *pip, "install", "-q", "--no-index", "--no-deps", wheel, cwd=folder)
