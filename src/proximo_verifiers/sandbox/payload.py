"""Validates programs and puts them into sealed files in memory for the child process."""

import fcntl
import os
from collections.abc import Iterable

from proximo_verifiers.sandbox.jobs import MIB, Limits, Program
from proximo_verifiers.sandbox.kernel.namespaces import MAX_FILES

SIZE_BYTES = 8
MAX_DESCRIPTOR = 255
LEAST_MEMORY_BYTES = 128 * MIB
"""Smallest memory beside the scratch folder. The interpreter with its imports takes about half of it."""


def check_program(program: Program) -> None:
    """Raises ValueError for invalid limits, descriptors or files."""
    limits = program.limits
    for name in ("cpu_seconds", "wall_seconds", "idle_seconds", "scratch_bytes", "output_bytes", "threads"):
        if getattr(limits, name) is not None and not getattr(limits, name) > 0:
            raise ValueError(f"limits.{name} must be above 0, not {getattr(limits, name)}")
    if limits.memory_bytes - limits.scratch_bytes < LEAST_MEMORY_BYTES:
        raise ValueError(
            f"limits.memory_bytes ({limits.memory_bytes}) must exceed limits.scratch_bytes ({limits.scratch_bytes}) by "
            f"{LEAST_MEMORY_BYTES}, which the interpreter itself needs"
        )
    _check_descriptors(program.descriptors, limits)
    for name in program.files:
        if not name or name in (".", "..") or "/" in name or "\0" in name or len(os.fsencode(name)) > 255:
            raise ValueError(f"files must have plain names without folders, not {name!r}")
    if len(program.files) >= MAX_FILES or sum(map(len, program.files.values())) > limits.scratch_bytes // 2:
        raise ValueError(
            f"files must be fewer than {MAX_FILES} and take at most half of limits.scratch_bytes "
            f"({limits.scratch_bytes}); here are {len(program.files)} of {sum(map(len, program.files.values()))} bytes"
        )


def _check_descriptors(descriptors: Iterable[int], limits: Limits) -> None:
    for number in descriptors:
        if not 3 <= number < min(limits.open_files, MAX_DESCRIPTOR + 1):
            raise ValueError(
                f"descriptors must have numbers from 3 to {MAX_DESCRIPTOR} and below limits.open_files "
                f"({limits.open_files}), not {number}"
            )


def open_payload(program: Program) -> int:
    """A descriptor of a file in memory with the source, then names and contents of files, each prefixed by its size."""
    source = program.source.encode("utf-8", errors="surrogatepass")
    parts = [source, *(part for name, contents in program.files.items() for part in (os.fsencode(name), contents))]
    return _file_in_memory(*(piece for part in parts for piece in (len(part).to_bytes(SIZE_BYTES, "little"), part)))


def open_stdin(contents: bytes) -> int:
    """A descriptor of a sealed file in memory, or of /dev/null if there are no contents."""
    if not contents:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    return _file_in_memory(contents)


def _file_in_memory(*parts: bytes) -> int:
    descriptor = os.memfd_create("program", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as file:
        file.writelines(parts)
    os.lseek(descriptor, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor
