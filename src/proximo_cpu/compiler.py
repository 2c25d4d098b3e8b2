"""Finds the C compiler of this machine, and compiles the kernels in csrc/.

`CC` may hold options after the command, as in `CC="gcc -march=x86-64-v3"`; they are passed on.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from proximo.errors import UserError

COMPILE_SECONDS = 600.0
"""Limit of one call of the compiler, which takes seconds. A loaded machine must not cost a run its kernels."""

Command = tuple[str, ...]

_OWN_PROCESSOR = "-march=native"
_FLAGS = (
    *("-O3", "-std=gnu11", "-fPIC", "-fvisibility=hidden"),
    # No -ffast-math: it would reorder sums, and with them change the bits of results.
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"),
)


def find_compiler() -> Command | None:
    """The compiler as the words of a command line (`CC` may be `ccache gcc`), or None.

    Raises UserError for unclosed quotes in `CC`.
    """
    value = os.environ.get("CC", "")
    try:
        wanted = [shlex.split(value), ["cc"], ["gcc"], ["clang"]]
    except ValueError as error:
        raise UserError(f"the environment variable CC is {value!r}, which is not a valid command: {error}") from None
    return next((tuple(words) for words in wanted if words and shutil.which(words[0])), None)


@cache
def version_of(compiler: Command) -> str:
    """The output of `--version`."""
    return _run(*compiler, "--version")


@cache
def fingerprint(compiler: Command) -> str:
    """A hash of everything that determines the result: sources, flags, compiler and processor features."""
    digest = hashlib.blake2b(digest_size=8)
    options = [word for word in compiler if word.startswith("-")]
    for piece in (version_of(compiler), *options, *_flags(compiler), platform.machine(), _instructions()):
        digest.update(piece.encode() + b"\0")
    for path in _sources():
        digest.update(path.read_bytes())
    return digest.hexdigest()


def compile_kernels(compiler: Command, folder: Path) -> bytes:
    """The content of the shared library. `folder` is for temporary files.

    Raises CalledProcessError if the compiler fails.
    """
    units = [source for source in _sources() if source.suffix == ".c"]
    if not units:
        raise FileNotFoundError("their sources are missing from the package")
    with tempfile.TemporaryDirectory(dir=folder) as build:
        objects = [f"{build}/{unit.stem}.o" for unit in units]
        for unit, object_file in zip(units, objects, strict=True):
            _run(*compiler, *_flags(compiler), "-c", str(unit), "-o", object_file)
        library = Path(build, "library.so")
        _run(*compiler, "-shared", *objects, "-lm", "-o", str(library))
        return library.read_bytes()


def why_it_failed(error: Exception) -> str:
    """One line about the failure: the first error that the compiler reported, else its last line."""
    message = getattr(error, "stderr", None) or str(error)
    lines = [line.strip() for line in message.splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in lines if "error" in line), lines[-1])[:300]


def _flags(compiler: Command) -> Command:
    chosen = any(word.startswith(("-march=", "-mcpu=")) for word in compiler)
    return _FLAGS if chosen else (_OWN_PROCESSOR, *_FLAGS)


def _sources() -> list[Path]:
    return sorted(Path(__file__).with_name("csrc").glob("*.[ch]"))


def _instructions() -> str:
    """The processor features that `-march=native` depends on. One home folder may be shared by several machines."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    wanted = ("model name", "flags", "CPU implementer", "CPU part", "Features")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def _run(*command: str) -> str:
    completed = subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=COMPILE_SECONDS, check=True
    )
    return completed.stdout
