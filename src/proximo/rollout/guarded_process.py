"""A process that ends with this one, however this one ends, together with all that it started."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

GUARDIAN = Path(__file__).parent / "process_guardian.py"


class GuardedProcess:
    """Runs a command below a guardian (process_guardian.py), which ends both when this process does."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        ending_seconds: float,
    ) -> None:
        """Start it. Raises OSError if that is not possible.

        `log`: file to which its output is added. `folder`: removed when this process closes it or ends. `environment`:
        all of its variables; None for those of this process. `ending_seconds`: for its end, after which the guardian is
        killed.
        """
        self._ending_seconds = ending_seconds
        watched, self._held = os.pipe()
        try:
            with log.open("ab") as file:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", str(GUARDIAN), str(watched), str(folder or ""), *command],
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    pass_fds=(watched,),
                    start_new_session=True,
                    env=environment,
                )
        except OSError:
            os.close(self._held)
            raise
        finally:
            os.close(watched)

    @property
    def status(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process.poll()

    def close(self) -> None:
        """End it with all that it started; waits for that."""
        if self._held < 0:
            return
        os.close(self._held)
        self._held = -1
        try:
            self._process.wait(self._ending_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
