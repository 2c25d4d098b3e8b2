"""Who writes a part of a checkpoint: one process at once, or every rank its own file in the background. Not the store.

One rank alone has parts of the first kind, except where a test says otherwise.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from proximo.checkpoint.manifest import MANIFEST

STATE = "state.json"
Writer = Callable[[Path], None]
"""Makes a file or a folder at the path that it is given; nothing is there yet, its parent folder is. On several ranks,
rank 0 alone calls it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Captured:
    """What is to be written of a part, as it was when it was captured."""

    first: Writer
    """Called on rank 0 at once."""
    each: Callable[[Path], Path] | None = None
    """Called afterwards in a thread of every rank: writes one file into the folder that `first` made, and returns its
    path. None: `first` has written all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankWriter:
    """A part that lies on several ranks."""

    capture: Callable[[], Captured]
    """Called on every rank at the same step; ranks may exchange tensors in it. Training goes on after it."""


def captured(writers: Mapping[str, Writer | RankWriter]) -> dict[str, Captured]:
    """Each part as it is to be written. Every rank has to call it."""
    return {
        name: writer.capture() if isinstance(writer, RankWriter) else Captured(first=writer)
        for name, writer in writers.items()
    }


def check_names(writers: Mapping[str, Writer | RankWriter]) -> None:
    """Raises ValueError for a name that is no plain relative path, or that the store uses itself."""
    for name in writers:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or str(path) != name or name in (STATE, MANIFEST, "."):
            raise ValueError(f"{name!r} cannot name a part of a checkpoint: it must be a plain relative path")
