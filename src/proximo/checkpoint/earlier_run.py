"""The run that a new one replaces: kept aside until the new one has taken a step. Not who may replace it.

Each change is one rename, so that a crash leaves one of these, and `put_back` knows which:

- `.earlier-run.moving`: some files are aside, the others still in their place. Nothing new was written.
- `.earlier-run`: all files are aside. What lies in their place is the new run's.
- neither: the new run has begun, or there was none to replace.
"""

from pathlib import Path

from proximo.checkpoint import atomic

MOVING = ".earlier-run.moving"
ASIDE = ".earlier-run"
FAILED_START = "failed-start"
"""What a run wrote that replaced an earlier one and ended before its first step: its log says why."""


def kept_aside(folder: Path) -> Path | None:
    """Where the files of an earlier run lie that must be put back; None where there are none."""
    return next((folder / name for name in (ASIDE, MOVING) if (folder / name).is_dir()), None)


def move_aside(folder: Path, names: tuple[str, ...]) -> None:
    """Move the files of a run out of the way of a new one. Nothing may lie aside yet."""
    if (folder / FAILED_START).exists():
        atomic.remove(folder / FAILED_START)
    atomic.make_folder(folder / MOVING)
    for name in names:
        if (folder / name).exists():
            atomic.rename(folder / name, folder / MOVING / name)
    atomic.rename(folder / MOVING, folder / ASIDE)


def put_back(folder: Path, names: tuple[str, ...]) -> None:
    """Make the earlier run the folder's run again; what the new one wrote goes to `FAILED_START`."""
    if (folder / ASIDE).is_dir():
        for name in names:
            if (folder / name).exists():
                _keep_failed(folder, name)
        atomic.rename(folder / ASIDE, folder / MOVING)
    if (folder / MOVING).is_dir():
        for name in names:
            if (folder / MOVING / name).exists():
                atomic.rename(folder / MOVING / name, folder / name)
        atomic.remove(folder / MOVING)


def _keep_failed(folder: Path, name: str) -> None:
    atomic.make_folder(folder / FAILED_START)
    if (folder / FAILED_START / name).exists():  # of a start before this one
        atomic.remove(folder / FAILED_START / name)
    atomic.rename(folder / name, folder / FAILED_START / name)
