"""One rank of a command, which something happens to: `python faulty_rank.py FAULTS proximo's arguments`.

FAULTS is a JSON list, one for each attempt (TORCHELASTIC_RESTART_COUNT), such as {"rank": 1, "at": "step", "number": 3,
"do": "kill"}. `break_it` has the places, `DEEDS` what happens. `number` counts calls of the place in this process. Some
places are moments: "effect" is a change of the file system in a save; from the `step`-th step of this process on,
"call" is any call of a function, and "clock" a number of seconds.
"""

import functools
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
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
    "sleep": lambda: time.sleep(1000),
    "exit": lambda: os._exit(3),
}


def break_it(fault: dict[str, Any]) -> None:
    """Have the `number`-th call of a place fail."""
    from proximo.checkpoint import atomic, ranks
    from proximo.checkpoint.store import CheckpointStore
    from proximo.ppo.task import PPOTask
    from proximo.run import loop
    from proximo.supervised.sft_trainer import SFTTask

    steps = [(SFTTask, "step"), (PPOTask, "step")]
    effects = [(atomic, name) for name in ("_make_folder", "_write_file", "_sync", "_rename", "_delete")]
    places: dict[str, list[tuple[Any, str]]] = {
        "build": [(loop, "trainer_of")],
        "folder": [(loop, "open_run")],
        "step": steps,
        "evaluate": [(SFTTask, "evaluate")],
        "save": [(CheckpointStore, "_publish")],
        "shards": [(ranks, "_written")],
        "state": [(SFTTask, "state")],
    }
    number = fault["number"]
    match fault["at"]:
        case "call":
            at_call(steps, fault["step"], lambda: count_calls(number, lambda where: do(fault, f"in {where}")))
        case "clock":
            timer = threading.Timer(number, lambda: do(fault, "by the clock"))
            timer.daemon = True
            at_call(steps, fault["step"], timer.start)
        case "effect":
            save = [(CheckpointStore, "save")]
            at_call(save, 1, lambda: at_call(effects, number, lambda: do(fault, "within a save")))
        case at:
            at_call(places[at], number, lambda: do(fault, f"at {at} {number}"))


def do(fault: dict[str, Any], where: str) -> None:
    """The deed, and a note of it."""
    sys.setprofile(None)
    note(f"rank {fault['rank']}: {fault['do']} {where}")
    DEEDS[fault["do"]]()


def note(text: str) -> None:
    """A line for the test, past the streams of the rank."""
    os.write(2, f"fault: {time.monotonic():.1f} {text}\n".encode())


def at_call(places: Sequence[tuple[Any, str]], number: int, act: Callable[[], None]) -> None:
    """Act before the `number`-th call of any of the places."""
    calls = itertools.count(1)
    for owner, name in places:
        setattr(owner, name, _counted(getattr(owner, name), calls, number, act))


def _counted(original: Callable[..., Any], calls: Iterator[int], number: int, act: Callable[[], None]) -> Any:
    @functools.wraps(original)
    def counted(*arguments: Any, **named: Any) -> Any:
        if next(calls) == number:
            act()
        return original(*arguments, **named)

    return counted


def count_calls(number: int, act: Callable[[str], None]) -> None:
    """Act at the `number`-th call of any function of this thread from now on."""
    left = itertools.count(number, -1)

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event in ("call", "c_call") and next(left) == 0:
            act(frame.f_code.co_qualname)

    sys.setprofile(profile)


if __name__ == "__main__":
    import faulthandler

    faulthandler.register(signal.SIGQUIT, all_threads=True)
    faults, attempt = json.loads(sys.argv[1]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if faults and os.environ["RANK"] == "0":
        note(f"attempt {attempt} begins")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as the command sets it before torch is imported
    from proximo.run import journal

    journal.write_report = lambda folder: folder / "report.html"  # to draw it takes seconds, and nobody reads it
    if attempt < len(faults) and int(os.environ["RANK"]) == faults[attempt]["rank"]:
        break_it(faults[attempt])
    sys.exit(main(sys.argv[2:]))
