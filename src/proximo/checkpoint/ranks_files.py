"""The run folder as several ranks have it, and the part of a save that every rank does.

Each writes its own files, durable, then one word to the others, in a thread of its own.

Nothing is published before all ranks have said that their files are on the disk, and every rank learns how it ended.
"""

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from proximo.checkpoint import atomic
from proximo.checkpoint.manifest import FileEntry, describe_files
from proximo.distributed.world import current
from proximo.errors import CheckpointError, RunFolderError

SEEN_SECONDS = 60.0
"""How long a network file system may take to show one machine the file of another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Report:
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    problem: str | None = None


def check_shared(folder: Path) -> None:
    """Raises RunFolderError on every rank where one does not see a file that rank 0 writes into its `folder`."""
    world = current()

    def write() -> str:
        file = folder / f"{atomic.TEMPORARY_PREFIX}seen-{secrets.token_hex(8)}"
        file.touch()
        return file.name

    written = folder / world.once(write, what="the run folder to open")
    seconds = min(SEEN_SECONDS, world.timeout_seconds / 2)  # the others wait no longer than that for the answer
    try:
        seen = world.gather(_appears(written, seconds), what="all ranks to see the run folder")
    finally:
        if world.leads:
            written.unlink()
    if blind := [str(rank) for rank, sees in enumerate(seen) if not sees]:
        named = ", ".join(blind[:8]) + (" and more" if len(blind) > 8 else "")
        raise RunFolderError(
            f"rank {named} of {world.size} does not see what rank 0 writes into {folder}: run.folder must be on a file "
            "system that all machines of the run share"
        )


def _appears(file: Path, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not file.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def written_by_ranks(
    folder: Path,
    parts: Mapping[str, Callable[[Path], Path]],
    publish: Callable[[Mapping[str, FileEntry]], None],
    *,
    step: int,
) -> None:
    """Write this rank's file of each part; once all ranks have, rank 0 calls `publish` with their files.

    Raises CheckpointError on every rank where one of them could not write; then nothing is published.
    """
    world = current()
    what = f"the save of step {step}"
    reports = world.gather_aside(_written(folder, parts), what=what)
    problem = "; ".join(report.problem for report in reports if report.problem is not None) or None
    error: Exception | None = None
    if problem is None and world.leads:
        try:
            publish({name: entry for report in reports for name, entry in report.files.items()})
        except Exception as raised:
            error, problem = raised, f"rank 0: {raised}"
    problem = world.gather_aside(problem, what=what)[0]
    if error is not None:
        raise error
    if problem is not None:
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written: {problem}. Those before it are untouched: mend what "
            "refused, and go on from the latest with --resume"
        )


def check_all_seen(folder: Path, files: Mapping[str, FileEntry]) -> None:
    """Raises CheckpointError where a file that a rank wrote is not here, since the rank has another file system."""
    for name, entry in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != entry.num_bytes:
            raise CheckpointError(
                f"a rank has written {path}, and rank 0 does not see it with its {entry.num_bytes} bytes: run.folder "
                "must be on a file system that all machines of the run share"
            )


def _written(folder: Path, parts: Mapping[str, Callable[[Path], Path]]) -> _Report:
    try:
        paths = [write(folder / name) for name, write in parts.items()]
        atomic.sync_files(paths)
        names = [path.relative_to(folder).as_posix() for path in paths]
        return _Report(files=dict(zip(names, describe_files(paths), strict=True)))
    except Exception as error:  # told to all ranks
        return _Report(problem=f"rank {current().rank}: {type(error).__name__}: {error}")
