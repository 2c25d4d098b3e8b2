"""One rank of a command, which something happens to: `python faulty_rank.py FAULT proximo's arguments`.

FAULT is JSON: {"rank": 1, "at": "step", "number": 3, "do": "kill"}. `break_it` has the places, `DEEDS` what happens.
`number` counts calls. A fault happens in the first attempt alone (TORCHELASTIC_RESTART_COUNT).
"""

import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from proximo.cli import main
from proximo.errors import DataError


def _raise() -> None:
    raise ValueError("this was to fail")


def _refuse() -> None:
    raise DataError("this row is refused")


DEEDS: dict[str, Callable[[], None]] = {
    "raise": _raise,
    "refuse": _refuse,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": lambda: time.sleep(60),
    "exit": lambda: os._exit(3),
}


def break_it(fault: dict[str, Any]) -> None:
    from proximo.checkpoint import ranks_files
    from proximo.checkpoint.store import CheckpointStore
    from proximo.run import loop
    from proximo.supervised.sft.task import SFTTask

    places: dict[str, tuple[Any, str]] = {
        "build": (loop, "trainer_of"),
        "folder": (loop, "open_run"),
        "step": (SFTTask, "step"),
        "evaluate": (SFTTask, "evaluate"),
        "save": (CheckpointStore, "_publish"),
        "shards": (ranks_files, "_written"),
        "state": (SFTTask, "state"),
    }
    owner, name = places[fault["at"]]
    original, calls = getattr(owner, name), [0]

    @functools.wraps(original)
    def broken(*arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == fault["number"]:
            DEEDS[fault["do"]]()
        return original(*arguments, **named)

    setattr(owner, name, broken)


if __name__ == "__main__":
    import faulthandler

    faulthandler.register(signal.SIGUSR1, all_threads=True)
    given = json.loads(sys.argv[1])
    if given and int(os.environ["RANK"]) == given["rank"] and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as the command sets it before torch is imported
        break_it(given)
    sys.exit(main(sys.argv[2:]))
