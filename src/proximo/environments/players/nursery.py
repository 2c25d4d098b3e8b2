"""The process that players are forked from: it has imported the environment, so a player starts in milliseconds.

Players share the memory of what was imported. Each leads a session of its own, so that it is ended together with all
that it started, but for programs that begin another session, such as daemons. Runs in a worker process
(`proximo_verifiers/workers/main.py`) and imports no torch.
"""

import ctypes
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from proximo.environments.players.player import MakeEnvironment, Player, environment_maker
from proximo_verifiers.workers.frames import encode, read_frame
from proximo_verifiers.workers.services import ReadyService

NURSERY_SERVICE = "proximo.environments.players.nursery:nursery_service"
CLOSE_SECONDS = 5.0
"""Time for environments to close what they opened, before they are killed."""
_PR_SET_PDEATHSIG = 1


def nursery_service(path: str, options: Mapping[str, Any]) -> ReadyService:
    """Makes the service that forks players and ends them. Raises ConfigError if there is no such environment."""
    nursery = Nursery(environment_maker(path, options))
    gc.collect()
    gc.freeze()  # the collector of a player would write to, and so copy, the shared memory of what was imported
    if sys.platform == "linux":  # the worker would be killed with the trainer; this way it ends its players first
        signal.signal(signal.SIGTERM, lambda *_: nursery.end_all())
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    return nursery.serve, None, nursery.close


class Nursery:
    """Forks players, and knows which of them are alive."""

    def __init__(self, make: MakeEnvironment) -> None:
        self._make = make
        self._players: set[int] = set()

    def serve(self, request: Mapping[str, Any]) -> Any:
        """{"fork": [address, number]}: the id of the new process. {"end": id}: how the process ended, as text."""
        return self._fork(*request["fork"]) if "fork" in request else self._end(request["end"])

    def close(self) -> None:
        """Waits for the players to end by themselves, since their channels are closed, and kills the rest."""
        deadline = time.monotonic() + CLOSE_SECONDS
        while self._players and time.monotonic() < deadline:
            for process in tuple(self._players):
                with suppress(ChildProcessError):
                    if os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                        self._end(process)
            time.sleep(0.002)
        for process in tuple(self._players):
            self._end(process)

    def end_all(self) -> None:
        """Kills the players with all that they started, and ends this process, whose parent is gone."""
        for process in self._players:
            kill_group(process)
        os._exit(1)

    def _fork(self, address: str, number: int) -> int:
        process = os.fork()
        if process:
            self._players.add(process)
            return process
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            play(address, number, Player(self._make, owns_process=True))
        finally:
            os._exit(0)

    def _end(self, process: int) -> str:
        kill_group(process)  # before it is reaped, since its id and its group are not given to others until then
        self._players.discard(process)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def play(address: str, number: int, player: Player) -> None:
    """Answers requests on a channel to `address`, to which it says its number, until the other end closes it."""
    own = os.getpid()
    with socket.socket(socket.AF_UNIX) as channel, channel.makefile("rb") as requests:
        channel.connect(address)
        channel.sendall(encode({"player": number}))
        while (request := read_frame(requests)) is not None:
            reply = player.answer(request)
            if os.getpid() != own:  # a fork of the environment returned here as well
                os._exit(1)
            channel.sendall(encode(reply))
        player.close()


def kill_group(process: int) -> None:
    """Kills a player with all that it started, but for programs that began a session of their own."""
    for kill in (os.killpg, os.kill):  # a player that has only begun is not yet in a group of its own
        with suppress(ProcessLookupError, PermissionError):
            kill(process, signal.SIGKILL)
