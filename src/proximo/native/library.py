"""The kernels in C beside this file, compiled once per machine and loaded. Not what calls them.

They need Linux and a C compiler (`$CC`, `cc` or `gcc`) with GCC's vector extensions and its OpenMP, whose threads are
torch's own: nothing is linked, so that its names are found in what torch has loaded. Without them, and where
`PROXIMO_KERNELS=off` says so, torch's operators do the same work, slower.
"""

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from proximo.errors import UserError

SWITCH = "PROXIMO_KERNELS"
"""Environment variable: `off` for torch's operators alone."""

COMPILE_SECONDS = 120.0

_DECLARING = threading.Lock()

LOG = logging.getLogger("proximo.native")

_FLAGS = (
    *("-O3", "-march=native", "-std=gnu11", "-fPIC", "-fopenmp", "-fvisibility=hidden"),
    # Sums stay in the order in which they are written: -ffast-math is left out on purpose.
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"),
)


def kernels_for(like: Tensor) -> ctypes.CDLL | None:
    """The kernels where they can compute with tensors like this one: real numbers in float32 on a CPU, and nobody
    follows the operators of the caller's thread. Whoever calls them answers for the other tensors."""
    plain = type(like) in (Tensor, torch.nn.Parameter) and like.dtype is torch.float32 and like.device.type == "cpu"
    return library() if plain and _get_current_dispatch_mode() is None else None


@cache
def library() -> ctypes.CDLL | None:
    """Compiled if need be, in a few seconds; None where that is not possible or not wanted.

    Says so once, with what the compiler said where it failed. Raises UserError for a switch that says neither.
    """
    if not _is_wanted() or sys.platform != "linux":
        return None
    compiler = _compiler()
    if compiler is None:
        LOG.info("no C compiler was found (cc, gcc): torch's operators sample and train on a CPU, slower; install gcc")
        return None
    try:
        path = _folder() / f"kernels-{_fingerprint(compiler)}.so"
        with contextlib.suppress(OSError):  # not there yet, or cut short by a full disk
            return ctypes.CDLL(str(path))
        _compile(compiler, path)
        return ctypes.CDLL(str(path))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        LOG.warning(
            "%s could not make the kernels in C, and torch's operators work, slower (%s=off leaves them out): %s",
            *(shlex.join(compiler), SWITCH, said.strip()[-500:]),
        )
        return None


def describe_kernels() -> str | None:
    """What identifies the kernels in use, for the record of a run; None where there are none."""
    if library() is None:
        return None
    compiler = _compiler()
    assert compiler is not None
    return f"{_version(compiler).partition(chr(10))[0]}, {_fingerprint(compiler)}"


def declare(kernels: ctypes.CDLL, signatures: Mapping[str, Sequence[Any]]) -> None:
    """`signatures`: of each function, what it returns and what it takes. To be told before a function is called."""
    with _DECLARING:  # a look-up by two threads at once may find two objects, one of them undeclared
        for name, (returned, *taken) in signatures.items():
            function = getattr(kernels, name)
            function.restype, function.argtypes = returned, taken


def pointer(tensor: Tensor | None) -> int | None:
    """Where a contiguous tensor begins."""
    if tensor is None:
        return None
    assert tensor.is_contiguous(), "kernels read rows without gaps"
    return tensor.data_ptr()


def _is_wanted() -> bool:
    said = os.environ.get(SWITCH, "")
    if said.lower() not in ("", "on", "off"):
        raise UserError(f"the environment variable {SWITCH} is {said!r}; it takes on or off")
    return said.lower() != "off"


Command = tuple[str, ...]


def _compiler() -> Command | None:
    """The words of a command: `CC` may be `ccache gcc`. Raises UserError where its quotes are left open."""
    said = os.environ.get("CC", "")
    try:
        wanted = [shlex.split(said), ["cc"], ["gcc"]]
    except ValueError as error:
        raise UserError(f"the environment variable CC is {said!r}, which is no command: {error}") from None
    return next((tuple(words) for words in wanted if words and shutil.which(words[0])), None)


def _sources() -> list[Path]:
    return sorted(Path(__file__).parent.glob("*.[ch]"))


@cache
def _version(compiler: Command) -> str:
    return _say(*compiler, "--version")


@cache
def _fingerprint(compiler: Command) -> str:
    """Of all that decides what is compiled: sources, flags, compiler and instructions of the processor."""
    digest = hashlib.blake2b(digest_size=8)
    for piece in (_version(compiler), " ".join(_FLAGS), platform.machine(), _instructions()):
        digest.update(piece.encode() + b"\0")
    for path in _sources():
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _instructions() -> str:
    """What `-march=native` goes by. A home folder may serve several machines."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    wanted = ("model name", "flags", "CPU implementer", "CPU part", "Features")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def _folder() -> Path:
    """Where libraries are kept: a folder that nobody else can write to."""
    with contextlib.suppress(OSError, RuntimeError):  # nobody's home is known, or it cannot be written to
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "proximo"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.stat()
        if state.st_uid == os.getuid() and not state.st_mode & 0o022 and os.access(folder, os.W_OK):
            return folder
    return _own_folder()


@cache
def _own_folder() -> Path:
    """For this process alone."""
    kept = tempfile.TemporaryDirectory(prefix="proximo-kernels-")
    _KEPT.append(kept)
    return Path(kept.name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


def _compile(compiler: Command, path: Path) -> None:
    """Made aside and put in place at once: several processes may do it at the same time."""
    units = [source for source in _sources() if source.suffix == ".c"]
    if not units:
        raise FileNotFoundError("their sources are missing from the package")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder)
        for unit in units:
            _say(*compiler, *_FLAGS, "-c", str(unit), "-o", str(made / f"{unit.stem}.o"))
        objects = [str(made / f"{unit.stem}.o") for unit in units]
        _say(*compiler, "-shared", *objects, "-lm", "-o", str(made / path.name))
        (made / path.name).replace(path)


def _say(*command: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=COMPILE_SECONDS, check=True
    )
    return done.stdout
