"""The checkpoints of one run: saves each whole or not at all, verifies and prunes them.

A save writes everything under a temporary name, syncs it, writes the manifest last, renames the folder, and only then
updates the pointer file `latest`. After a crash a folder is therefore complete, or has a temporary name that the next
save deletes.
"""

import logging
import math
from collections.abc import Collection, Generator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

from proximo.checkpoint import atomic
from proximo.checkpoint.ranks import (
    Captured,
    RankWriter,
    Writer,
    captured,
    check_all_seen,
    written_by_ranks,
)
from proximo.checkpoint.reading import (
    MANIFEST,
    STATE,
    STEP_NAME,
    Checkpoint,
    DamagedError,
    FileEntry,
    Manifest,
    describe_folder,
    encode_state,
    folder_of,
    open_checkpoint,
    read_manifest,
    saved_steps,
)
from proximo.distributed.world import current, in_background
from proximo.errors import CheckpointError, RankError, disk_refused
from proximo.message_text import count_of

LOG = logging.getLogger("proximo.checkpoint")
LATEST = "latest"
BEST = "best"


class CheckpointStore:
    """The checkpoints of one run, in `folder`, which the first save makes. One process writes at a time.

    keep_last: how many of the newest to keep (None: all). The one with the best metric is kept as well.
    best: whether the highest or the lowest metric is best; the earlier one wins a tie.
    """

    def __init__(
        self, folder: Path, *, keep_last: int | None = None, best: Literal["highest", "lowest"] = "highest"
    ) -> None:
        self.folder = folder
        self._keep_last = keep_last
        self._sign = 1.0 if best == "highest" else -1.0
        self._pending: tuple[str, Future[None]] | None = None

    def save(
        self,
        step: int,
        writers: Mapping[str, Writer | RankWriter],
        state: Mapping[str, Any],
        *,
        metric: float | None = None,
        keeps_all: bool = False,
    ) -> Checkpoint | None:
        """Write a checkpoint and make it the latest.

        `keeps_all`: remove earlier checkpoints only at the next save.

        Each writer is called with the path of its name (relative, "/" between folders). `state` is JSON. A metric that
        is not finite counts as not measured. A step that is already the latest is not written again: with an equal
        state its checkpoint is returned, and another state is an error. Checkpoints of later steps belong to an
        abandoned branch and are deleted. Raises CheckpointError if the disk refuses; earlier checkpoints are then still
        complete.

        On several ranks all call it at the same step. Rank 0 writes everything except the parts of a `RankWriter`:
        these are copied now and written in the background, and None is returned. The next save waits for that, and so
        does `finish`.
        """
        self.finish()
        metric = metric if metric is not None and math.isfinite(metric) else None
        encoded = encode_state(state)
        what = f"the save of step {step}"
        saved = current().on_rank_0(lambda: self._saved_before(step, state, metric), what=what)
        if saved is not None:
            return saved
        parts = captured(writers)
        temporary = current().on_rank_0(lambda: self._begin(step, parts, encoded), what=what)
        shared = {name: part.each for name, part in parts.items() if part.each is not None}
        if not shared:
            return current().on_rank_0(lambda: self._publish(step, temporary, metric, {}, keeps_all), what=what)

        def publish(files: Mapping[str, FileEntry]) -> None:
            self._publish(step, temporary, metric, files, keeps_all)

        work = partial(written_by_ranks, temporary, shared, publish, step=step)
        self._pending = what, in_background(work, name=what)
        return None

    def finish(self, *, timeout_seconds: float | None = None) -> None:
        """Wait for the save in the background, if there is one. Raises its error on every rank.

        `timeout_seconds`: None takes that of the ranks.
        """
        if self._pending is None:
            return
        (what, pending), self._pending = self._pending, None
        seconds = timeout_seconds or current().timeout_seconds
        if not wait([pending], timeout=min(seconds, 1e8)).done:
            raise RankError(
                f"{what} has not ended within {seconds:g} s: the disk is too slow for it, or a rank does not answer. "
                "devices.timeout_seconds is how long to wait"
            )
        pending.result()

    def tidy(self) -> None:
        """Delete checkpoints beyond `keep_last`, and what a crash left unfinished. Each save ends with it.

        Resuming a finished run calls it too, because a crash may have cut off the end of its last save.
        """
        latest = self._latest_step()
        if latest is not None:
            self._point_to(latest)
            self._prune(latest)
        atomic.clear_temporaries(self.folder)

    def latest(self) -> Checkpoint | None:
        """The checkpoint to resume from, which `latest` names; None before the first save.

        Raises CheckpointError if files are missing or have another size. Only `load` compares hashes.
        """
        step = self._latest_step()
        return None if step is None else self._read(step, parts=())

    def load(self, step: int | None = None, *, parts: Collection[str] | None = None) -> Checkpoint:
        """The checkpoint of a step, by default that of `latest`, with every file's hash compared.

        parts: names of the writers whose files are hashed; None means all. Other files must have the right size.
        Raises CheckpointError that names the damaged file.
        """
        wanted = self._latest_step() if step is None else step
        if wanted is None:
            raise CheckpointError(f"{self.folder} holds no checkpoint yet: there is nothing to load")
        return self._read(wanted, parts=parts)

    def newest_whole(self, *, parts: Collection[str] | None = None) -> tuple[Checkpoint | None, dict[int, str]]:
        """The checkpoint of `latest`, or else the newest earlier one that is whole, and the damages of newer ones.

        `parts` as for `load`. None before the first save. Raises what `load` raises if none is whole.
        """
        wanted, damages = self._latest_step(), dict[int, str]()
        if wanted is not None and wanted not in self.steps():
            damages[wanted] = "it is missing"
        for step in reversed([step for step in self.steps() if wanted is not None and step <= wanted]):
            try:
                return open_checkpoint(self.folder, step, parts=parts), damages
            except DamagedError as damage:
                damages[step] = str(damage)
        return (None if wanted is None else self._read(wanted, parts=parts)), damages

    def go_back_to(self, checkpoint: Checkpoint, *, damaged: Collection[int]) -> None:
        """Make an earlier checkpoint the latest, and rename the damaged ones: `damaged-step-000100`."""
        self._point(LATEST, checkpoint.step)
        for folder in filter(Path.exists, map(self._folder_of, damaged)):
            aside = folder.with_name(f"damaged-{folder.name}")
            if aside.exists():
                atomic.remove(aside)
            atomic.rename(folder, aside)

    def best(self) -> Checkpoint | None:
        """The checkpoint with the best metric, sizes compared; None if none was measured.

        A warning counts those of another format, which are passed over. Raises CheckpointError if a manifest is
        damaged, because the best is then unknown, or if only those of another format may be it.
        """
        foreign = []
        for step in self.steps():
            found = self._manifest(step)
            if isinstance(found, DamagedError):
                raise CheckpointError(
                    f"the best checkpoint is unknown: {found}. Remove {self._folder_of(step)} to choose among the "
                    "others, or name one of them with --checkpoint"
                ) from found
            if isinstance(found, CheckpointError):
                foreign.append(found)
        step = self._best_step()
        if foreign and step is None:
            raise foreign[-1]
        if foreign:
            num = count_of(len(foreign), "checkpoint")
            LOG.warning(
                "the best checkpoint is chosen without %s of another format, such as this: %s", num, foreign[-1]
            )
        return None if step is None else self._read(step, parts=())

    def steps(self) -> tuple[int, ...]:
        """The steps with a checkpoint, ascending, damaged ones too."""
        return saved_steps(self.folder)

    def _folder_of(self, step: int) -> Path:
        return folder_of(self.folder, step)

    def _saved_before(self, step: int, state: Mapping[str, Any], metric: float | None) -> Checkpoint | None:
        if self._latest_step() != step:
            return None
        latest = self._read(step, parts=())
        if latest.state != state or (metric is not None and latest.metric != metric):
            raise CheckpointError(
                f"{latest.folder} is the latest checkpoint and holds another state or metric than the one to save now "
                f"for the same step {step}: a step has one outcome"
            )
        return latest

    def _begin(self, step: int, parts: Mapping[str, Captured], state: bytes) -> Path:
        """Write the parts of rank 0 under a temporary name, and return it."""
        with self._refused_by_disk(step):
            atomic.make_folder(self.folder)
            atomic.clear_temporaries(self.folder)
            temporary = atomic.temporary_beside(self._folder_of(step))
            atomic.make_folder(temporary)
            for name, part in parts.items():
                path = temporary / name
                atomic.make_folder(path.parent)
                part.first(path)
                if not path.exists():
                    raise ValueError(f"the writer {name!r} of the checkpoint of step {step} wrote nothing at its path")
            atomic.write_bytes(temporary / STATE, state)
            return temporary

    def _publish(
        self,
        step: int,
        temporary: Path,
        metric: float | None,
        files_of_ranks: Mapping[str, FileEntry],
        keeps_all: bool,
    ) -> Checkpoint:
        """Write the manifest of a checkpoint whose parts are all written, rename it, and update the pointers."""
        with self._refused_by_disk(step):
            check_all_seen(temporary, files_of_ranks)
            atomic.fsync_tree(temporary)
            manifest = describe_folder(temporary, step=step, metric=metric, known=files_of_ranks)
            atomic.write_bytes(temporary / MANIFEST, manifest.encode())
            atomic.publish_folder(temporary, self._folder_of(step))
            self._point_to(step)
            if not keeps_all:
                self.tidy()
        return self._read(step, parts=())

    @contextmanager
    def _refused_by_disk(self, step: int) -> Generator[None]:
        try:
            yield
        except Exception as error:
            if not disk_refused(error):
                raise
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written to {self.folder}: {error}. "
                "Earlier ones are untouched: make room, or repair the disk, and continue with --resume=auto"
            ) from error

    def _point_to(self, latest: int) -> None:
        best = self._best_step(until=latest)
        if best is not None:
            self._point(BEST, best)
        elif (self.folder / BEST).is_file():
            atomic.remove(self.folder / BEST)
        self._point(LATEST, latest)

    def _point(self, pointer: str, step: int) -> None:
        content = f"{self._folder_of(step).name}\n".encode()
        path = self.folder / pointer
        if not path.is_file() or path.read_bytes() != content:
            atomic.write_bytes_atomically(path, content)

    def _latest_step(self) -> int | None:
        path = self.folder / LATEST
        if not path.is_file():  # the first save was stopped between the rename and the pointer
            return max(self.steps(), default=None)
        content = path.read_bytes()
        name = STEP_NAME.fullmatch(content.decode("utf-8", "replace").strip())
        if name is None:
            raise CheckpointError(
                f"{path} must name a checkpoint, for example step-000100, got {content[:40]!r}. {self._way_on()}"
            )
        return int(name[1])

    def _best_step(self, *, until: float = math.inf) -> int | None:
        """The best step by the manifests, of those up to `until`: the pointer may be out of date after a crash."""
        measured = []
        for step in (each for each in self.steps() if each <= until):
            found = self._manifest(step)  # one that cannot be read is not the best; loading it raises the error
            if isinstance(found, Manifest) and found.metric is not None:
                measured.append((self._sign * found.metric, -step))
        return -max(measured)[1] if measured else None

    def _manifest(self, step: int) -> Manifest | DamagedError | CheckpointError:
        """The manifest of a step's checkpoint, or why `read_manifest` cannot read it."""
        try:
            return read_manifest(self._folder_of(step))
        except (DamagedError, CheckpointError) as error:
            return error

    def _prune(self, latest: int) -> None:
        steps = [step for step in self.steps() if step <= latest]
        kept = set(steps if self._keep_last is None else steps[-self._keep_last :])
        kept.add(latest)
        # Those of another format may be the best by metrics that this version cannot read.
        kept |= {step for step in steps if isinstance(self._manifest(step), CheckpointError)}
        best = self._best_step(until=latest)
        for step in self.steps():
            if step not in kept and step != best:
                atomic.remove(self._folder_of(step))

    def _read(self, step: int, *, parts: Collection[str] | None) -> Checkpoint:
        try:
            return open_checkpoint(self.folder, step, parts=parts)
        except DamagedError as damage:
            raise CheckpointError(
                f"the checkpoint of step {step} is not complete: {damage}. {self._way_on()}"
            ) from damage

    def _way_on(self) -> str:
        """Advice for a damaged checkpoint, or for a pointer that names none."""
        return (
            f"To continue from another one, write its name into {self.folder / LATEST} and resume, or give it as "
            "--checkpoint to a command that reads the run; where there is no other, --overwrite begins anew"
        )
