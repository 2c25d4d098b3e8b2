"""Writers of checkpoint parts: by rank 0 at once, or by every rank, each its own file, in the background.

A checkpoint is published after all ranks have reported that their files are on disk; every rank learns the outcome.
"""

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from proximo.checkpoint import atomic
from proximo.checkpoint.reading import MANIFEST, FileEntry, describe_files, read_manifest
from proximo.distributed.world import current
from proximo.errors import CheckpointError, RunFolderError

Writer = Callable[[Path], None]
"""Makes a file or a folder at the given path, which does not exist yet. On several ranks, rank 0 alone calls it."""
SEEN_SECONDS = 60.0
"""How long a network file system may take to show one machine the file of another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Captured:
    """The contents of a part at the moment of the save, not yet written."""

    first: Writer
    """Called on rank 0 at once."""
    each: Callable[[Path], Path] | None = None
    """Called afterwards in a thread of every rank: writes one file into the folder that `first` made, and returns its
    path. None if `first` writes everything."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankWriter:
    """A part whose tensors are spread over several ranks."""

    capture: Callable[[], Captured]
    """Called on every rank at the same step; ranks may exchange tensors in it. Training continues after it."""


def captured(writers: Mapping[str, Writer | RankWriter]) -> dict[str, Captured]:
    """Capture every part. Every rank has to call it."""
    return {
        name: writer.capture() if isinstance(writer, RankWriter) else Captured(first=writer)
        for name, writer in writers.items()
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class _Report:
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    problem: str | None = None


def check_shared(folder: Path) -> None:
    """Raises RunFolderError on every rank if one of them does not see a file that rank 0 writes into `folder`."""
    world = current()

    def write() -> str:
        file = folder / f"{atomic.TEMPORARY_PREFIX}seen-{secrets.token_hex(8)}"
        file.touch()
        return file.name

    written = folder / world.on_rank_0(write, what="the run folder to open")
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

    If one rank could not write, nothing is published and CheckpointError is raised on every rank.
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
            f"the checkpoint of step {step} could not be written: {problem}. Earlier ones are untouched: fix the "
            "problem, and continue from the latest with --resume"
        )


def check_all_seen(folder: Path, files: Mapping[str, FileEntry]) -> None:
    """Raises CheckpointError if a file that a rank wrote is missing here: the rank has another file system."""
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
    except Exception as error:  # sent to all ranks
        return _Report(problem=f"rank {current().rank}: {type(error).__name__}: {error}")


def replace_shards(checkpoint: Path, part: str, shards: str, write: Writer) -> None:
    """Put whole weight files into a finished checkpoint in place of the shards of its ranks.

    The weight files of the folder that `write` makes go into the folder `part`; `shards` is removed from there. Other
    files that `write` makes (configurations) are already there and are left out. `checkpoint` is the folder of one
    step.

    The new files get their names first; no manifest lists them yet. Then the manifest that lists them replaces the old
    one, and then the shards are removed. After a crash the checkpoint is therefore complete by its manifest.
    """
    atomic.clear_temporaries(checkpoint)
    atomic.clear_temporaries(checkpoint / part)
    temporary = atomic.temporary_beside(checkpoint / part)
    write(temporary)
    # The index comes last, because readers find the other files through it.
    files = [*sorted(temporary.glob("*.safetensors")), *sorted(temporary.glob("*.safetensors.index.json"))]
    atomic.fsync_tree(temporary)
    entries = dict(zip([f"{part}/{path.name}" for path in files], describe_files(files), strict=True))
    for path in files:
        atomic.rename(path, checkpoint / part / path.name)
    manifest = read_manifest(checkpoint)
    kept = {name: entry for name, entry in manifest.files.items() if not name.startswith(f"{part}/{shards}/")}
    manifest = replace(manifest, files=dict(sorted((kept | entries).items())))
    atomic.write_bytes_atomically(checkpoint / MANIFEST, manifest.encode())
    atomic.remove(checkpoint / part / shards)
    atomic.clear_temporaries(checkpoint)
