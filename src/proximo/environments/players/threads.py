"""Environments that play in threads of this process.

Threads are for environments given as Python objects. One that hangs cannot be ended: its thread is left alone. Worker
processes (`processes.py`) are for all others.
"""

import queue
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from proximo.environments.players.player import MakeEnvironment, Player


@dataclass(frozen=True, slots=True)
class PlayerEnded:
    """News of a player that ended by itself."""

    reason: str
    """How, in words that follow "its process"."""


class ThreadPlayers:
    """Players by number. Each holds one environment, and replies to the requests of `Player.answer` in their order."""

    def __init__(self, make: MakeEnvironment) -> None:
        """`make` is called without arguments, once for each player, in its thread."""
        self._make = make
        self._requests: dict[int, queue.SimpleQueue[Mapping[str, Any] | None]] = {}
        self._replies: queue.SimpleQueue[tuple[int, dict[str, Any] | PlayerEnded]] = queue.SimpleQueue()
        self._num_opened = 0

    def begin_player(self) -> int:
        """The number of a new player."""
        number = self._num_opened = self._num_opened + 1
        self._requests[number] = queue.SimpleQueue()
        name = f"environment-{number}"
        threading.Thread(target=self._play, args=(number, self._requests[number]), daemon=True, name=name).start()
        return number

    def send(self, number: int, request: Mapping[str, Any]) -> None:
        """Give a player a request. Never waits."""
        self._requests[number].put(request)

    def wait(self, seconds: float) -> list[tuple[int, dict[str, Any] | PlayerEnded]]:
        """The replies that have arrived. Waits at most this long for the first."""
        replies: list[tuple[int, dict[str, Any] | PlayerEnded]] = []
        with suppress(queue.Empty):
            replies.append(self._replies.get(timeout=seconds) if seconds > 0 else self._replies.get_nowait())
            while True:
                replies.append(self._replies.get_nowait())
        return replies

    def end(self, number: int) -> None:
        """Have a player end after what it does now. What `wait` still says of it is old news."""
        self._requests.pop(number).put(None)

    def close(self) -> None:
        """Have all players end."""
        for number in tuple(self._requests):
            self.end(number)

    def _play(self, number: int, requests: "queue.SimpleQueue[Mapping[str, Any] | None]") -> None:
        player = Player(self._make, owns_process=False)
        while (request := requests.get()) is not None:
            self._replies.put((number, player.answer(request)))
        player.close()
