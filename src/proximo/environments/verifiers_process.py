"""The process that plays episodes of verifiers, seen from the trainer: it is started, and ended with the run."""

import json
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proximo.errors import ConfigError
from proximo.rollout.guarded_process import GuardedProcess
from proximo_verifiers.progress_log import logging_start

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase

BRIDGE = Path(__file__).parent / "inside" / "verifiers_bridge.py"
START_SECONDS = 300.0
"""For imports, and for a taskset to be loaded."""
ENDING_SECONDS = 60.0
POLL_SECONDS = 0.1


class VerifiersProcess:
    """One process for all episodes. It ends with `close`, and with this process however that ends."""

    def __init__(self, python: str, settings: Mapping[str, Any], tokenizer: "PreTrainedTokenizerBase") -> None:
        """Starts it and waits until it serves. `settings`: see inside/verifiers_bridge.py.

        Raises ConfigError if it ends before, with its last line.
        """
        self._folder = Path(tempfile.mkdtemp(prefix="proximo-verifiers-"))
        self.address = str(self._folder / "bridge")
        self._log = self._folder / "log"
        tokenizer.save_pretrained(self._folder / "tokenizer")
        given = {**settings, "socket": self.address, "tokenizer": str(self._folder / "tokenizer")}
        command = [python, str(BRIDGE), json.dumps(given)]
        self._process = GuardedProcess(command, log=self._log, folder=self._folder, ending_seconds=ENDING_SECONDS)
        try:
            with logging_start("environment verifiers", "its process"):
                self._wait_until_ready(python)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End it with all that it started; waits for that."""
        self._process.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait_until_ready(self, python: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not Path(self.address).exists():
            if self._process.status is not None or time.monotonic() > deadline:
                how = "was not ready in time" if self._process.status is None else "ended before it was ready"
                lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
                raise ConfigError(
                    f"environment verifiers: the process of {python} {how}: {lines[-1] if lines else 'it said nothing'}"
                )
            time.sleep(POLL_SECONDS)
