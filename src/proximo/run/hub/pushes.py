"""Uploads the model of a run's checkpoints during the run. A failure is counted and shown; the run continues.

Each upload is a separate process: it shares no thread with the training and can be ended. It reads hard links, so that
the run may prune the checkpoint meanwhile.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from proximo.checkpoint import atomic
from proximo.checkpoint.reading import Checkpoint
from proximo.checkpoint.run_folder import PUSHES
from proximo.checkpoint.store import CheckpointStore
from proximo.config.sinks import PushConfig
from proximo.errors import redacted
from proximo.models.pretrained.sharded_folders import holds_shards
from proximo.run.model_card import write_card

STATE = "state.json"
POLL_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class _State:
    """The last push and the failures, saved in the run folder."""

    name: str
    step: int | None = None
    card: str | None = None
    """Hash of the card that was uploaded last, which may be replaced."""
    failures: int = 0
    """Failures that no line of metrics.jsonl has counted yet."""
    reason: str | None = None
    """Why the last push failed; None if it did not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Upload:
    """An upload that is running."""

    process: subprocess.Popen[bytes]
    step: int
    said: Path
    """File of its standard output: the result as JSON."""
    reason: Path
    """File of its standard error: why it failed."""


class Pushes:
    """The pushes of one run: one upload at a time. Each step is pushed at most once, over resumes too."""

    def __init__(self, config: PushConfig, run: Path, *, warn: Callable[[str], None], note: Callable[[str], None]):
        self.num_failures = 0
        self._config = config
        self._run = run
        self._folder = run / PUSHES
        self._warn = warn
        self._note = note
        self._state = self._remembered()
        self._current: _Upload | None = None

    @property
    def outcome(self) -> Mapping[str, Any]:
        """The values for the run's outcome; each is None if it has nothing to report."""
        return {"push_failures": self._state.failures or None, "not_pushed": self._state.reason}

    def take_failures(self) -> int:
        """The number of failures since the last call, those of earlier processes of the run included."""
        self.look()
        failures = self._state.failures
        if failures:
            self._remember(replace(self._state, failures=0))
        return failures

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
        upload = self._current
        if upload is None or upload.process.poll() is None:
            return
        self._current = None
        said, reason = (path.read_text(encoding="utf-8", errors="replace") for path in (upload.said, upload.reason))
        self._clear()
        try:
            pushed = json.loads(said) if upload.process.returncode == 0 else None
        except ValueError:
            pushed, reason = None, said
        if pushed is None:
            self._failed(upload.step, reason or f"the upload ended with status {upload.process.returncode}")
            return
        card = pushed["card"] or self._state.card
        self._remember(replace(self._state, step=upload.step, card=card, reason=None))
        self._note(f"pushed step {upload.step} to {pushed['url']}")

    def finish(self, store: CheckpointStore) -> None:
        """Upload what is due at the end of the run, and wait for it."""
        deadline = time.monotonic() + 60 * self._config.wait_minutes
        self._wait(deadline)
        self.saved(store, ended=True)
        self._wait(deadline)
        if self._current is not None:
            self._failed(self._current.step, f"it has not ended within {self._config.wait_minutes:g} minutes")
        self.close()
        if self.num_failures:
            self._warn(f"failed pushes to {self._config.name}: {self.num_failures}; --resume=auto tries again")

    def close(self) -> None:
        """End a running upload: the Hub then keeps what it had."""
        upload, self._current = self._current, None
        if upload is not None:
            upload.process.kill()
            upload.process.wait()
            self._clear()

    def _wait(self, deadline: float) -> None:
        while self._current is not None and time.monotonic() < deadline:
            self.look()
            time.sleep(POLL_SECONDS)

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
        request = staged.with_suffix(".json")
        asked = {
            "folder": str(staged),
            "name": self._config.name,
            "private": self._config.private,
            "message": f"Step {checkpoint.step}",
            "own_card": self._state.card,
            "parent": os.getpid(),
        }
        request.write_text(json.dumps(asked), encoding="utf-8")
        said, reason = staged.with_suffix(".out"), staged.with_suffix(".err")
        with said.open("wb") as out, reason.open("wb") as err:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "proximo.run.hub.upload", str(request)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,  # so that Ctrl-C reaches the run only
                env={**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
            )
        self._current = _Upload(process=process, step=checkpoint.step, said=said, reason=reason)

    def _failed(self, step: int, reason: str) -> None:
        self.num_failures += 1
        told = (redacted(reason).strip().splitlines() or [""])[-1][:500]
        failures = self._state.failures + 1
        self._remember(replace(self._state, failures=failures, reason=f"step {step} to {self._config.name}: {told}"))
        if self.num_failures == 1:
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
            atomic.make_folder(self._folder)
            atomic.write_bytes_atomically(self._folder / STATE, json.dumps(asdict(state)).encode())


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)
