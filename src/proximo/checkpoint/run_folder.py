"""The folder of one run: when a run may start or resume in it, its lock, and the paths of its files.

The marker file makes a folder a run folder and carries the lock. A copy without the marker is recognised by the files
of a run. To replace a run, its whole folder is moved aside, so that nothing is lost.
"""

import contextlib
import fcntl
import json
import math
import os
import socket
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, Self

from proximo.checkpoint import atomic
from proximo.checkpoint.reading import MANIFEST, saved_steps
from proximo.errors import RunFolderError
from proximo.message_text import count_of

Resume = Literal["never", "must", "auto"]
EndState = Literal["finished", "stopped", "failed"]

MARKER = ".proximo-run"
CHECKPOINTS = "checkpoints"
CONFIG = "config.yaml"
RESOLVED_CONFIG = "config.resolved.json"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
"""A line for each step."""
SAMPLES = "samples.jsonl"
"""A line for each sample that is kept for reading."""
TENSORBOARD = "tensorboard"
TRACKERS = "trackers"
"""State of the sinks of experiment trackers: their position, and lines not sent yet."""
PUSHES = "push"
"""State of the uploads to the Hub: finished and running ones."""
REPORT = "report.html"
OUTCOME = "outcome.json"
"""How the run ended; absent while it is running."""
LOG = "log.txt"
"""The plain lines that the run printed."""
RANKS = "ranks"
"""Tracebacks of single ranks, each written by its rank; rank 0 writes everything else."""
SERVERS = "servers"
"""Logs of servers. They start, and may fail, before the run folder is opened."""
MERGED = "merged"
"""Models of a stage with their adapters added in, for the stages that start from them."""


class RunFolder:
    """An open run folder. Holds the lock until it is closed or the process dies."""

    def __init__(self, path: Path, *, resuming: bool, marker: IO[str], replaced: Path | None = None) -> None:
        self.path = path.absolute()  # a user-defined function may change the working directory later
        self.resuming = resuming
        """Whether there is a checkpoint to resume from, and the caller asked for it."""
        self.replaced = replaced
        """The folder to which an earlier run was moved; None if there was none."""
        self._marker = marker

    def write_config(self, text: str, resolved: Mapping[str, Any]) -> None:
        """Write the recipe as given (`text`), and every effective setting."""
        atomic.write_bytes_atomically(self.path / CONFIG, text.encode())
        atomic.write_bytes_atomically(self.path / RESOLVED_CONFIG, _json(resolved))

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """Write what `describe_environment` found."""
        atomic.write_bytes_atomically(self.path / ENVIRONMENT, _json(environment))

    def write_outcome(self, state: EndState, *, total_steps: int, reason: str | None = None) -> None:
        """Write how the run ended: finished, stopped by a signal, or failed.

        `reason`: why it failed, which signal stopped it, or why a run that finished took no update.
        """
        outcome = {"state": state, "total_steps": total_steps, "reason": reason}
        atomic.write_bytes_atomically(self.path / OUTCOME, _json(outcome))

    def close(self) -> None:
        """Release the lock, so that another process can open the folder."""
        self._marker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()


def open_run(folder: Path, *, resume: Resume = "never", overwrite: bool = False) -> RunFolder:
    """Open the folder of a run to start or to resume in it, and lock it.

    resume: "never" refuses a folder in which a run recorded something; "must" resumes from its latest checkpoint and
    refuses if there is none; "auto" resumes if there is one and starts otherwise.
    overwrite: start even if a run recorded something there. A folder with records is renamed (`RunFolder.replaced`),
    and a new one made in its place.

    Raises RunFolderError, with nothing changed, if these rules refuse, the folder holds something else than a run,
    another process has the lock, or the folder cannot be renamed.
    """
    check_run(folder, resume=resume, overwrite=overwrite)
    marker = _lock(folder)
    try:
        check_run(folder, resume=resume, overwrite=overwrite)  # again, since another process may have held the lock
        atomic.clear_temporaries(folder)
        resuming = not overwrite and bool(saved_steps(folder / CHECKPOINTS))
        replaced = None
        if _makes_room(folder, overwrite=overwrite):
            replaced = _move_aside(folder)
            marker.close()
            marker = _lock(folder)
        elif not resuming:
            for name in (OUTCOME, REPORT):  # of a run that failed before its first step
                (folder / name).unlink(missing_ok=True)
    except BaseException:
        marker.close()
        raise
    return RunFolder(folder, resuming=resuming, marker=marker, replaced=replaced)


def open_abandoned(folder: Path, *, by: str) -> RunFolder | None:
    """Open the folder of a run whose process was killed, to write how it ended.

    `by`: the process, for example `process 4711 on node1`. None if another process has begun a run there since, or the
    run has an outcome.
    """
    try:
        if (folder / OUTCOME).exists() or (folder / MARKER).read_text(encoding="utf-8").strip() != by:
            return None
        return RunFolder(folder, resuming=False, marker=_lock(folder))
    except (OSError, UnicodeDecodeError, RunFolderError):
        return None


def is_run_folder(folder: Path) -> bool:
    """Whether a run was ever opened in `folder`. A copy without hidden files is recognised by its contents."""
    saved = (f"{CHECKPOINTS}/step-{step:06d}/{MANIFEST}" for step in saved_steps(folder / CHECKPOINTS))
    return any((folder / name).is_file() for name in (MARKER, RESOLVED_CONFIG, *saved))


def described_run(folder: Path) -> str:
    """What the run in `folder` came to, and how a command goes on from it, as text to follow the folder's name."""
    if not _has_records(folder):
        return "holds a run that took no step: it is started again"
    steps = saved_steps(folder / CHECKPOINTS)
    if not steps:
        return "holds a run without a checkpoint: use --resume=auto or --overwrite to start it again"
    if steps[-1] >= _finished_steps(folder):
        finished = f"holds a finished run of {count_of(steps[-1], 'step')}"
        return f"{finished}: use --resume=auto to leave it or to add steps, --overwrite to replace it"
    return f"holds a run at step {steps[-1]}: use --resume to continue it, --overwrite to replace it"


def check_run(folder: Path, *, resume: Resume, overwrite: bool) -> None:
    """Raises what `open_run` would, and changes nothing: for a caller that builds models first."""
    if overwrite and resume != "never":
        raise RunFolderError(f"--overwrite replaces the run in {folder} and --resume continues it: choose one")
    _refuse_place(folder)
    exists = is_run_folder(folder)
    if not exists and folder.is_dir() and any(entry.name != SERVERS for entry in folder.iterdir()):
        raise RunFolderError(
            f"the folder {folder} has contents but holds no run (no {MARKER} in it), and is left alone: give a new or "
            "an empty folder"
        )
    if resume == "must" and not exists:
        raise RunFolderError(f"there is no run to resume in {folder}: leave --resume out to start one")
    if resume == "must" and not saved_steps(folder / CHECKPOINTS):
        raise RunFolderError(
            f"the run in {folder} has no checkpoint yet, there is nothing to resume: use --resume=auto to start it "
            "from the beginning"
        )
    if exists and resume == "never" and not overwrite and _has_records(folder):
        raise RunFolderError(f"{folder} already {described_run(folder)}, or give another folder")
    if _makes_room(folder, overwrite=overwrite) and not os.access(folder.resolve().parent, os.W_OK | os.X_OK):
        raise RunFolderError(
            f"the run in {folder} cannot be moved aside: the permissions of {folder.resolve().parent} refuse it; give "
            "another folder"
        )


def check_new_folder(out: Path) -> None:
    """Raises RunFolderError if no folder can be made at `out`, for a command that writes one."""
    if out.exists():
        raise RunFolderError(f"{out} exists and is left as it is: give a folder that does not exist yet")
    _refuse_place(out)


def _refuse_place(folder: Path) -> None:
    """Raises RunFolderError if there can be no folder, or it cannot be written."""
    above = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    if not above.is_dir():
        raise RunFolderError(f"{above} is a file, so that there can be no folder {folder}: give another one")
    if not os.access(above, os.W_OK | os.X_OK):
        raise RunFolderError(f"the folder {folder} cannot be written: the permissions of {above} refuse it")


def _makes_room(folder: Path, *, overwrite: bool) -> bool:
    """Whether a run that starts here moves the run in the folder aside."""
    return _has_records(folder) and (overwrite or not saved_steps(folder / CHECKPOINTS))


def _has_records(folder: Path) -> bool:
    """Whether a run took a step. A run that failed earlier has nothing to lose, and may start again."""
    logs = (folder / METRICS, folder / SAMPLES)
    return bool(saved_steps(folder / CHECKPOINTS)) or any(log.is_file() and log.stat().st_size for log in logs)


def _finished_steps(folder: Path) -> float:
    """The number of steps of a finished run; infinite for any other."""
    try:
        outcome = json.loads((folder / OUTCOME).read_bytes())
        return outcome["total_steps"] if outcome["state"] == "finished" else math.inf
    except (OSError, ValueError, LookupError, TypeError):
        return math.inf


def _lock(folder: Path) -> IO[str]:
    """Open the marker, make it if it is missing, and lock it.

    It is a POSIX record lock, which ends with this process even if its children live on. It keeps out other processes
    only, and is lost when this process closes the marker through any handle.
    """
    try:
        atomic.make_folder(folder)
        marker = (folder / MARKER).open("a+", encoding="utf-8")
    except OSError as error:
        raise RunFolderError(f"the run folder {folder} cannot be written: {error}") from error
    try:
        fcntl.lockf(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        marker.seek(0)
        holder = marker.read().strip()
        marker.close()
        raise RunFolderError(
            f"another process ({holder}) is training in {folder}: wait for it, or give another folder"
        ) from error
    try:
        marker.truncate(0)
        marker.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        marker.flush()
    except OSError as error:
        with contextlib.suppress(OSError):  # closing flushes the rest, which the disk refuses again
            marker.close()
        raise RunFolderError(f"the run folder {folder} cannot be written: {error}") from error
    return marker


def _move_aside(folder: Path) -> Path:
    """Rename a run folder to the first free `NAME.replaced-N`, and make an empty folder in its place.

    If the folder is a link, its target is renamed. Raises RunFolderError if the system refuses, as for a mount point.
    """
    place = folder.resolve()
    names = (place.with_name(f"{place.name}.replaced-{number}") for number in count(1))
    aside = next(name for name in names if not os.path.lexists(name))
    try:
        atomic.rename(place, aside)
        atomic.make_folder(place)
        if (aside / SERVERS).is_dir():
            atomic.rename(aside / SERVERS, place / SERVERS)  # servers of the run that begins write there
    except OSError as error:
        raise RunFolderError(
            f"the run in {folder} cannot be moved to {aside} to make room for another: {error}; give another folder"
        ) from error
    return aside


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()
