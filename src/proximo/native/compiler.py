"""The C compiler of this machine: which, with what options, and what it makes of the sources beside this file.

`CC` may hold options after the command, as in `CC="gcc -march=x86-64-v3"`: they count for what is compiled.
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

COMPILE_SECONDS = 120.0

Command = tuple[str, ...]

_OWN_PROCESSOR = "-march=native"
_FLAGS = (
    *("-O3", "-std=gnu11", "-fPIC", "-fvisibility=hidden"),
    # Sums stay in the order in which they are written: -ffast-math is left out on purpose.
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"),
)


def find_compiler() -> Command | None:
    """The words of a command: `CC` may be `ccache gcc`. Raises UserError where its quotes are left open."""
    said = os.environ.get("CC", "")
    try:
        wanted = [shlex.split(said), ["cc"], ["gcc"], ["clang"]]
    except ValueError as error:
        raise UserError(f"the environment variable CC is {said!r}, which is no command: {error}") from None
    return next((tuple(words) for words in wanted if words and shutil.which(words[0])), None)


@cache
def version_of(compiler: Command) -> str:
    """What it says of itself."""
    return _say(*compiler, "--version")


@cache
def fingerprint(compiler: Command) -> str:
    """Of all that decides what is compiled: sources, flags, compiler and instructions of the processor."""
    digest = hashlib.blake2b(digest_size=8)
    options = [word for word in compiler if word.startswith("-")]
    for piece in (version_of(compiler), *options, *_flags(compiler), platform.machine(), _instructions()):
        digest.update(piece.encode() + b"\0")
    for path in _sources():
        digest.update(path.read_bytes())
    return digest.hexdigest()


def compile_kernels(compiler: Command, folder: Path) -> bytes:
    """The library. `folder` is for what is made on the way. Raises CalledProcessError where the compiler fails."""
    units = [source for source in _sources() if source.suffix == ".c"]
    if not units:
        raise FileNotFoundError("their sources are missing from the package")
    with tempfile.TemporaryDirectory(dir=folder) as made:
        objects = [f"{made}/{unit.stem}.o" for unit in units]
        for unit, made_of_unit in zip(units, objects, strict=True):
            _say(*compiler, *_flags(compiler), "-c", str(unit), "-o", made_of_unit)
        library = Path(made, "library.so")
        _say(*compiler, "-shared", *objects, "-lm", "-o", str(library))
        return library.read_bytes()


def why_it_failed(error: Exception) -> str:
    """In one line: of all that a compiler says its first error, or else its last line."""
    said = getattr(error, "stderr", None) or str(error)
    lines = [line.strip() for line in said.splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in lines if "error" in line), lines[-1])[:300]


def _flags(compiler: Command) -> Command:
    chosen = any(word.startswith(("-march=", "-mcpu=")) for word in compiler)
    return _FLAGS if chosen else (_OWN_PROCESSOR, *_FLAGS)


def _sources() -> list[Path]:
    return sorted(Path(__file__).parent.glob("*.[ch]"))


def _instructions() -> str:
    """What `-march=native` goes by. A home folder may serve several machines."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    wanted = ("model name", "flags", "CPU implementer", "CPU part", "Features")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def _say(*command: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=COMPILE_SECONDS, check=True
    )
    return done.stdout
