"""Many environments at once: episodes in lanes, with deadlines, retries of `reset`, and faults that are counted.

Each episode has a player to itself while it lasts, so an environment that is slow, hangs, dies or eats memory delays
and harms no other, and one that uses the global random numbers of its process gives the same answers whatever plays
beside it. A player is kept for the next episode, unless there was a fault.
"""

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from proximo.environments.environment import EnvironmentFault, EnvironmentStep
from proximo.environments.players.processes import ProcessPlayers
from proximo.environments.players.threads import PlayerEnded, ThreadPlayers
from proximo.errors import ConfigError, DataError
from proximo_verifiers.progress_log import logging_start
from proximo_verifiers.workers.loop import START_SECONDS
from proximo_verifiers.workers.work import backoff_seconds

Players = ThreadPlayers | ProcessPlayers
ATTEMPTS = 3
"""How often a reset is tried before it is a fault. A step is never repeated: the environment may have acted."""


@dataclass(eq=False, slots=True)
class _Lane:
    """An episode, from its start until it is stopped."""

    number: int
    reset: Mapping[str, Any]
    """The request that begins it."""
    player: int | None = None
    failures: int = 0
    not_before: float = 0.0
    """Monotonic time before which a reset is not tried again."""
    loss: EnvironmentFault | None = None
    """What happened to its environment while the policy wrote."""


@dataclass(eq=False, slots=True)
class _State:
    """What a player does, as the pool knows it."""

    lane: _Lane | None
    """None for one that is free, or whose episode was stopped while it worked."""
    calls: deque[str] = field(default_factory=deque)
    """Names of the calls that it has not answered. It works on the first."""
    deadline: float = 0.0
    """When the first call must be answered."""


class EnvironmentPool:
    """Plays episodes with players. To be used from one thread.

    Each `start` and each `step` of a lane has one answer, which `poll` gives, unless the lane is stopped before. A
    fault ends the episode: the lane is still to be stopped.
    """

    def __init__(self, players: Players, *, name: str, workers: int, timeout_seconds: float) -> None:
        """At most `workers` episodes at once; more wait for their turn. `timeout_seconds` limits each reset and step.

        Makes a first environment, and raises ConfigError if that fails: so would all others. `name` is for messages.
        """
        self.name = name
        self._players = players
        self._workers = workers
        self._timeout_seconds = timeout_seconds
        self._lanes: dict[int, _Lane] = {}
        self._waiting: deque[_Lane] = deque()
        self._states: dict[int, _State] = {}
        self._answers: list[tuple[int, EnvironmentStep | EnvironmentFault]] = []
        self._num_retries = 0
        try:
            self._make_first()
        except BaseException:
            self.close()
            raise

    def start(self, lane: int, *, seed: int, row: Mapping[str, Any]) -> None:
        """Begins an episode in a lane that is free. Raises DataError for a row that cannot be sent to a process."""
        assert lane not in self._lanes, f"lane {lane} has an episode"
        self._lanes[lane] = _Lane(lane, {"call": "reset", "seed": seed, "row": dict(row)})
        self._waiting.append(self._lanes[lane])
        self._hand_out()

    def step(self, lane: int, text: str) -> None:
        """Gives the environment what the policy wrote."""
        held = self._lanes[lane]
        if held.player is None:
            self._answers.append((lane, held.loss or EnvironmentFault(reason="its episode had ended")))
        else:
            self._ask(held.player, {"call": "step", "text": text})

    def stop(self, lane: int) -> None:
        """Frees the lane. What its environment is still doing is waited for, until its deadline, and dropped."""
        held = self._lanes.pop(lane)
        self._answers = [answer for answer in self._answers if answer[0] != lane]
        if held in self._waiting:
            self._waiting.remove(held)
        if held.player is not None:
            self._states[held.player].lane = None
        self._hand_out()

    def poll(self, wait_seconds: float) -> list[tuple[int, EnvironmentStep | EnvironmentFault]]:
        """The answers that have arrived, by lane. Waits at most this long for the first."""
        until = time.monotonic() + wait_seconds
        while True:
            self._hand_out()
            now = time.monotonic()
            ahead = min([until, *self._due(now)])
            seconds = 0.0 if self._answers or not self._lanes else max(0.0, ahead - now)
            for number, message in self._players.wait(seconds):
                if number in self._states:
                    self._on_message(number, message)
            self._check_deadlines()
            if self._answers or not self._lanes or time.monotonic() >= until:
                answers, self._answers = self._answers, []
                return answers

    def take_retries(self) -> int:
        """How many resets were tried again since the last call."""
        taken, self._num_retries = self._num_retries, 0
        return taken

    def close(self) -> None:
        """Ends all environments and their processes."""
        self._players.close()

    def _make_first(self) -> None:
        number = self._open(None)
        with logging_start(f"environment {self.name}", "the first to be made"):
            while self._states[number].calls:
                for _, message in self._players.wait(max(0.0, self._states[number].deadline - time.monotonic())):
                    ended = isinstance(message, PlayerEnded)
                    if ended or "raised" in message:
                        reason = f"its process {message.reason}" if ended else message["raised"]
                        raise ConfigError(f"environment {self.name}: {reason}")
                    self._states[number].calls.popleft()
                if self._states[number].calls and time.monotonic() >= self._states[number].deadline:
                    raise ConfigError(f"environment {self.name}: it was not made within {START_SECONDS:g} seconds")

    def _hand_out(self) -> None:
        """Gives episodes that wait to players that are free, and to new ones."""
        now = time.monotonic()
        for lane in [each for each in self._waiting if each.not_before <= now]:
            free = next((number for number, each in self._states.items() if not (each.lane or each.calls)), None)
            if free is None and len(self._states) >= self._workers:
                return
            self._waiting.remove(lane)
            lane.player = self._open(lane) if free is None else free
            try:
                self._ask(lane.player, lane.reset)
            except DataError:  # nobody can play this row: the lane and the player are free again
                self._states[lane.player].lane = None
                del self._lanes[lane.number]
                raise
            self._states[lane.player].lane = lane

    def _open(self, lane: _Lane | None) -> int:
        number = self._players.begin_player()
        self._states[number] = _State(lane)
        self._ask(number, {"call": "make"})
        return number

    def _ask(self, number: int, request: Mapping[str, Any]) -> None:
        state = self._states[number]
        self._players.send(number, request)
        state.calls.append(request["call"])
        if len(state.calls) == 1:
            state.deadline = time.monotonic() + self._limit(state)

    def _limit(self, state: _State) -> float:
        return START_SECONDS if state.calls[0] == "make" else self._timeout_seconds

    def _due(self, now: float) -> list[float]:
        """When something is to be done, whatever arrives: deadlines, and the ends of pauses."""
        return [
            *(state.deadline for state in self._states.values() if state.calls),
            *(lane.not_before for lane in self._waiting if lane.not_before > now),
        ]

    def _on_message(self, number: int, message: Mapping[str, Any] | PlayerEnded) -> None:
        state = self._states[number]
        if isinstance(message, PlayerEnded):
            del self._states[number]
            self._lost(state, EnvironmentFault(reason=f"its process {message.reason}", kind="died"))
        elif "raised" in message:
            self._discard(number, EnvironmentFault(reason=message["raised"], kind=message["kind"]))
        else:
            call = state.calls.popleft()
            if state.calls:
                state.deadline = time.monotonic() + self._limit(state)
            if state.lane is not None and call != "make":
                step = EnvironmentStep(**message["value"], seconds=message["seconds"])
                self._answers.append((state.lane.number, step))

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for number, state in tuple(self._states.items()):
            if state.calls and now >= state.deadline:
                limit = f"{self._limit(state):g} seconds"
                limit = limit if state.calls[0] == "make" else f"timeout_seconds = {self._timeout_seconds:g}"
                reason = f"{state.calls[0]}() did not answer within {limit}"
                self._discard(number, EnvironmentFault(reason=reason, kind="timeout"))

    def _discard(self, number: int, fault: EnvironmentFault) -> None:
        """Ends a player whose environment failed: what state it is in is not known."""
        state = self._states.pop(number)
        self._players.end(number)
        self._lost(state, fault)

    def _lost(self, state: _State, fault: EnvironmentFault) -> None:
        """A player is gone: its reset is tried again, its step is a fault. Between calls, the next step hears of it."""
        lane = state.lane
        if lane is None:
            return
        lane.player = None
        if not state.calls:
            lane.loss = fault
        elif "step" in state.calls:
            self._answers.append((lane.number, fault))
        else:
            lane.failures += 1
            if lane.failures >= ATTEMPTS:
                self._answers.append((lane.number, fault))
            else:
                self._num_retries += 1
                lane.not_before = time.monotonic() + backoff_seconds(lane.failures)
                self._waiting.append(lane)
