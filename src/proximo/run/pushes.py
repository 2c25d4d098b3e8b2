"""Uploads models to the Hugging Face Hub: those of a run's checkpoints beside the training, and exported ones.

A push that fails is shown, and counted if the run goes on; a resume tries again. The upload runs in a thread that
ends with the process. It reads hard links, so that the run may prune the checkpoint meanwhile.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Generator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic

import huggingface_hub
from huggingface_hub.errors import HTTPError
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from proximo.checkpoint import atomic
from proximo.checkpoint.reading import Checkpoint
from proximo.checkpoint.run_folder import PUSHES
from proximo.checkpoint.store import CheckpointStore
from proximo.config.sinks import PushConfig
from proximo.distributed.world import in_background
from proximo.errors import ProximoError, redacted
from proximo.models.pretrained.sharded_folders import holds_shards
from proximo.run.model_card import CARD, write_card

STATE = "state.json"
WAIT_MINUTES = 30.0
"""How long the end of a run waits for the last upload, which is then given up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _State:
    """The last push of a run, saved in its folder."""

    name: str
    step: int | None = None
    card: str | None = None
    """Hash of the card that was uploaded last, which may be replaced."""


class Pushes:
    """The pushes of one run: one upload at a time. Each step is pushed at most once, over resumes too."""

    def __init__(self, config: PushConfig, run: Path, *, warn: Callable[[str], None], note: Callable[[str], None]):
        self._config = config
        self._run = run
        self._folder = run / PUSHES
        self._warn = warn
        self._note = note
        self._state = self._remembered()
        self._current: tuple[int, Future[Pushed]] | None = None
        """The step that is being uploaded, and the result to come."""
        self.num_failures = 0

    def saved(self, store: CheckpointStore, *, ended: bool = False) -> None:
        """Begin to upload what is due after a save, or at the end of the run.

        If an upload is running, the save is left to the next call.
        """
        self.look()
        if self._current is not None or not (ended or self._config.when != "end"):
            return
        due = store.best() if self._config.when == "best" else store.latest()
        if due is None and ended:
            due = store.latest()
        if due is not None and due.step != self._state.step:
            try:
                self._begin(due)
            except (OSError, StopIteration) as error:
                self._failed(due.step, str(error))

    def look(self) -> None:
        """Count and show the outcome of an upload that has ended."""
        if self._current is None or not self._current[1].done():
            return
        (step, upload), self._current = self._current, None
        self._clear()
        if (error := upload.exception()) is not None:
            self._failed(step, str(error) or type(error).__name__)
            return
        pushed = upload.result()
        self._remember(_State(name=self._config.name, step=step, card=pushed.card or self._state.card))
        self._note(f"pushed step {step} to {pushed.url}")

    def finish(self, store: CheckpointStore) -> None:
        """Upload what is due at the end of the run, and wait for it."""
        end = monotonic() + 60 * WAIT_MINUTES
        self._wait(end)
        self.saved(store, ended=True)
        self._wait(end)
        if self._current is not None:
            self._failed(self._current[0], f"it has not ended within {WAIT_MINUTES:g} minutes")
        self.close()

    def close(self) -> None:
        """Give up a running upload: it ends with the process, and finds no more files."""
        self.look()
        self._current = None
        self._clear()

    def _wait(self, end: float) -> None:
        if self._current is not None:
            wait([self._current[1]], timeout=max(0.0, end - monotonic()))
            self.look()

    def _begin(self, checkpoint: Checkpoint) -> None:
        role = checkpoint.roles[0]
        source = checkpoint.folder / role
        if holds_shards(source):  # joined into whole files at the end of the run
            return
        self._clear()
        staged = self._folder / f"step-{checkpoint.step:06d}"
        atomic.make_folder(self._folder)
        shutil.copytree(source, staged, copy_function=_link)
        write_card(staged, self._run, role=role, step=checkpoint.step)
        config, message, own_card = self._config, f"Step {checkpoint.step}", self._state.card

        def upload() -> Pushed:
            with _without_progress_bars():
                return push_folder(staged, config.name, private=True, message=message, own_card=own_card)

        self._current = checkpoint.step, in_background(upload, name=f"push of step {checkpoint.step}")

    def _failed(self, step: int, reason: str) -> None:
        self.num_failures += 1
        told = (redacted(reason).strip().splitlines() or [""])[-1][:500]
        self._warn(f"step {step} was not pushed to {self._config.name}, and the run continues: {told}")

    def _clear(self) -> None:
        for left in self._folder.glob("step-*"):
            atomic.remove(left)

    def _remembered(self) -> _State:
        with suppress(OSError, TypeError, ValueError):
            state = _State(**json.loads((self._folder / STATE).read_bytes()))
            if state.name == self._config.name:
                return state
        return _State(name=self._config.name)

    def _remember(self, state: _State) -> None:
        self._state = state
        with suppress(OSError):  # at worst the same step is pushed once more
            atomic.write_bytes_atomically(self._folder / STATE, json.dumps(asdict(state)).encode())


@contextmanager
def _without_progress_bars() -> Generator[None]:
    """The Hub's bars, which would cross those of the run, are off within; they are a setting of the whole process."""
    were_off = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not were_off:
            enable_progress_bars()


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pushed:
    """The result of an upload."""

    url: str
    card: str | None
    """Git's hash of the model card that was uploaded; None if the Hub's own was kept."""


def push_folder(folder: Path, name: str, *, private: bool, message: str, own_card: str | None = None) -> Pushed:
    """Upload the folder as the model `name`, created if missing, in one commit.

    A model card on the Hub is kept, unless its hash is `own_card`: then an earlier upload wrote it. Raises ProximoError
    if the Hub cannot be reached or refuses.
    """
    api = huggingface_hub.HfApi()
    try:
        address = api.create_repo(name, private=private, exist_ok=True)
        there = [each.blob_id for each in api.get_paths_info(address.repo_id, [CARD]) if hasattr(each, "blob_id")]
        keeps = bool(there) and there != [own_card]
        without = [CARD] if keeps else []
        api.upload_folder(repo_id=address.repo_id, folder_path=folder, ignore_patterns=without, commit_message=message)
    except (OSError, HTTPError, ValueError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ProximoError(
            f"it could not be pushed to {name}: {reason}. Is there a network, and are you logged in (`hf auth login`) "
            "with write access?"
        ) from error
    card = folder / CARD
    return Pushed(url=str(address), card=None if keeps or not card.is_file() else git_hash(card.read_bytes()))


def git_hash(data: bytes) -> str:
    """The hash that git, and so the Hub, computes for the content of a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
