"""A disk that stops at the n-th effect of a save, and a store that writes known contents. Imports no torch."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from proximo.checkpoint import atomic
from proximo.checkpoint.reading import Checkpoint
from proximo.checkpoint.store import CheckpointStore

EFFECTS = ("_make_folder", "_write_file", "_sync", "_rename", "_delete")


class Stopped(BaseException):
    """The process is as good as dead: nothing catches this."""


def stop() -> None:
    raise Stopped


class FaultyDisk:
    """Stands in for the effects of `atomic`, counts them (a writer is one too), and stops at number `stop_at`.

    moment: "before" the effect, "torn" (half of it is done), or "after" it. Nothing is really synced: what would be
    durable is kept in mind instead, for `lose_power`.
    """

    def __init__(self, patch: Callable[[Any, str, Any], None], stop: Callable[[], None] = stop) -> None:
        self.effects: list[tuple[str, str]] = []
        self.stop_at: int | None = None
        self.moment = "before"
        self._stop = stop
        self._durable_files: set[int] = set()
        self._pending_renames: list[tuple[Path, Path, bytes | None]] = []
        really = {name: getattr(atomic, name) for name in EFFECTS}
        patch(atomic, "_make_folder", lambda path: self._do("make_folder", path, lambda: really["_make_folder"](path)))
        patch(atomic, "_write_file", self.write)
        patch(atomic, "_sync", lambda path: self._do("sync", path, lambda: self._sync(path)))
        patch(atomic, "_rename", lambda path, new: self._do("rename", new, lambda: self._rename(path, new)))
        patch(
            atomic,
            "_delete",
            lambda path: self._do("delete", path, lambda: really["_delete"](path), lambda: self._delete_half(path)),
        )

    def watch(self, folder: Path, *, stop_at: int | None = None, moment: str = "before") -> None:
        """Begin a new count; all that lies in the folder is durable."""
        self.effects = []
        self.stop_at = stop_at
        self.moment = moment
        self._durable_files = {path.stat().st_ino for path in folder.rglob("*") if path.is_file()}
        self._pending_renames = []

    def write(self, path: Path, data: bytes) -> None:
        """Write a file that is not durable until it is synced."""

        def write_part(part: bytes) -> None:
            path.write_bytes(part)
            self._durable_files.discard(path.stat().st_ino)

        self._do("write", path, lambda: write_part(data), lambda: write_part(data[: len(data) // 2]))

    def lose_power(self, folder: Path) -> None:
        """Leave what a disk may hold after a power failure: no rename and no contents that were not synced."""
        for path, new_path, replaced in reversed(self._pending_renames):
            new_path.rename(path)
            if replaced is not None:
                new_path.write_bytes(replaced)
                self._durable_files.add(new_path.stat().st_ino)
        for path in folder.rglob("*"):
            if path.is_file() and path.stat().st_ino not in self._durable_files:
                path.write_bytes(b"")

    def _do(
        self, effect: str, path: Path, do: Callable[[], object], do_half: Callable[[], object] = lambda: None
    ) -> None:
        self.effects.append((effect, path.name))
        if len(self.effects) - 1 != self.stop_at:
            do()
            return
        if self.moment == "torn":
            do_half()
        if self.moment == "after":
            do()
        self._stop()

    def _sync(self, path: Path) -> None:
        if path.is_file():
            self._durable_files.add(path.stat().st_ino)
        self._pending_renames = [entry for entry in self._pending_renames if entry[1].parent != path]

    def _rename(self, path: Path, new_path: Path) -> None:
        replaced = new_path.read_bytes() if new_path.is_file() else None
        path.replace(new_path)
        self._pending_renames.append((path, new_path, replaced))

    def _delete_half(self, folder: Path) -> None:
        for path in [path for path in sorted(folder.rglob("*")) if path.is_file()][::2]:
            path.unlink()


def contents(step: int) -> dict[str, bytes]:
    """The files that the writers of `save` make, by path in the checkpoint."""
    return {
        "policy/model.safetensors": f"weights {step}".encode() * 20,
        "policy/config.json": b"{}",
        "optimizer/policy.safetensors": f"moments {step}".encode() * 10,
    }


def save(store: CheckpointStore, disk: FaultyDisk, step: int, metric: float | None = None) -> Checkpoint:
    """Save a checkpoint with known contents: one writer makes a folder, one a file."""

    def write_policy(path: Path) -> None:
        path.mkdir()
        for name in ("model.safetensors", "config.json"):
            disk.write(path / name, contents(step)[f"policy/{name}"])

    def write_optimizer(path: Path) -> None:
        disk.write(path, contents(step)["optimizer/policy.safetensors"])

    writers = {"policy": write_policy, "optimizer/policy.safetensors": write_optimizer}
    return store.save(step, writers, {"step": step, "kl_coefficient": step / 3}, metric=metric)


def is_whole(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint has exactly the contents of its step."""
    files = {name: (checkpoint.folder / name).read_bytes() for name in contents(checkpoint.step)}
    state = {"step": checkpoint.step, "kl_coefficient": checkpoint.step / 3}
    return files == contents(checkpoint.step) and checkpoint.state == state


def main(folder: str, step: str, stop_at: str, moment: str) -> None:
    """Save in this process and die at an effect, for tests that start it as a process."""
    disk = FaultyDisk(setattr, stop=lambda: os._exit(9))
    disk.watch(Path(folder), stop_at=int(stop_at), moment=moment)
    save(CheckpointStore(Path(folder), keep_last=1), disk, int(step), metric=float(step))
    print(json.dumps(len(disk.effects)))
