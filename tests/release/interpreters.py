"""Finds the interpreters and the builds of torch that a machine offers to the check of a release."""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from running import Deadline, Failed, run

SUPPORTED = ("3.11", "3.12", "3.13", "3.14")
MODULES = ("bz2", "ctypes", "lzma", "sqlite3", "ssl")
"""An interpreter may be compiled without them, where a library was missing. Dependencies import them."""
HEAVY = re.compile(r"(torch|triton|nvidia-|cuda-)")


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """What is not checked, and why."""

    what: str
    why: str


def interpreters(asked: Sequence[str]) -> tuple[list[Path], list[LeftOut]]:
    """The interpreters to check: those asked for, else one for each supported version that this machine has."""
    found, left_out = [], []
    for name in asked or SUPPORTED:
        candidates = [Path(name)] if asked else _candidates(name)
        reasons = [_why_not(path, None if asked else name) for path in candidates]
        usable = [path for path, reason in zip(candidates, reasons, strict=True) if reason is None]
        if usable:
            found.append(usable[0])
        else:
            why = reasons[-1] if reasons else "no such interpreter was found: PYTHONS=/path/to/python names one"
            left_out.append(LeftOut(what=f"Python {name}", why=str(why)))
    return found, left_out


def _candidates(version: str) -> list[Path]:
    """On the PATH, then of pyenv, then of uv."""
    found = [Path(path) for path in [shutil.which(f"python{version}")] if path is not None]
    of_pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    found += sorted(of_pyenv.glob(f"{version}.*/bin/python"), reverse=True)
    command = ["uv", "python", "find", "--managed-python", "--no-python-downloads", version]
    of_uv = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    return found + [Path(line) for line in of_uv.stdout.split()]


def _why_not(python: Path, version: str | None) -> str | None:
    code = f"import sys, {', '.join(MODULES)}; print('%d.%d' % sys.version_info[:2])"
    try:
        said = run([python, "-c", code], cwd=Path.cwd(), deadline=Deadline(60)).strip()
    except (Failed, OSError) as failure:
        return f"{python} does not run: {str(failure).strip().splitlines()[-1]}"
    if said not in (SUPPORTED if version is None else (version,)):
        return f"{python} is Python {said}, and {' or '.join(SUPPORTED)} is supported"
    return None


def why_not_installed(pins: Sequence[str], *, python: Path, deadline: Deadline) -> str | None:
    """Why these exact versions would cost a download of gigabytes; None if they cost none.

    The build of torch for CPUs counts as small, and so does what uv has in its cache or in the folder UV_FIND_LINKS.
    """
    heavy = [pin for pin in pins if HEAVY.match(pin)]
    if not any(pin.startswith("nvidia-") for pin in heavy):
        return None
    install = ["uv", "pip", "install", "--dry-run", "--offline", "--no-deps", "--python", str(python), *heavy]
    # It ends well where uv knows the metadata of a wheel whose file it has not.
    said = subprocess.run(install, capture_output=True, text=True, check=False, timeout=deadline.seconds_left)
    if said.returncode == 0 and "Would download" not in said.stderr:
        return None
    (torch,) = (pin for pin in heavy if pin.startswith("torch=="))
    return f"{torch} with CUDA is not on this machine: TORCH=any downloads gigabytes"


def torch_at_hand(python: Path, *, deadline: Deadline) -> str | None:
    """The version of the newest torch for this interpreter in the folders of UV_FIND_LINKS; None if there is none."""
    if not os.environ.get("UV_FIND_LINKS"):
        return None
    command = ["uv", "pip", "compile", "--quiet", "--python", str(python), "--no-index", "--no-deps", "--no-build"]
    command += ["--no-header", "--no-annotate", "-"]
    found = subprocess.run(
        command, input="torch\n", capture_output=True, text=True, check=False, timeout=deadline.seconds_left
    )
    return found.stdout.strip().removeprefix("torch==") if found.returncode == 0 else None
