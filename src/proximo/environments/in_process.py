"""Environments in the trainer's own process: for classes that are given in Python. Nothing ends one that hangs."""

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from proximo.environments.environment import Environment, EnvironmentFault, EnvironmentStep, as_step

Answer = EnvironmentStep | EnvironmentFault


class InProcessEnvironments:
    """One object of the class for each lane. Coroutines of all lanes run side by side, in a thread of their own."""

    def __init__(self, make: Callable[[], Environment]) -> None:
        self._make = make
        self._free: list[Environment] = []
        self._playing: dict[int, Environment] = {}
        self._answers: list[tuple[int, Answer]] = []
        self._awaited: dict[int, tuple[Future[Any], bool]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, lane: int, *, seed: int, row: Mapping[str, Any]) -> None:
        """See `Environments.start`."""

        def reset() -> Any:
            environment = self._playing[lane] = self._free.pop() if self._free else self._make()
            return environment.reset(seed=seed, row=row)

        self._call(lane, reset, first=True)

    def step(self, lane: int, text: str) -> None:
        """See `Environments.step`."""
        self._call(lane, lambda: self._playing[lane].step(text), first=False)

    def stop(self, lane: int) -> None:
        """See `Environments.stop`. The object of an episode that failed is not used again."""
        future, _ = self._awaited.pop(lane, (None, False))
        environment = self._playing.pop(lane, None)
        if future is not None:
            future.cancel()
        elif environment is not None:
            self._free.append(environment)
        self._answers = [(number, answer) for number, answer in self._answers if number != lane]

    def poll(self, wait_seconds: float) -> list[tuple[int, Answer]]:
        """See `Environments.poll`."""
        if self._awaited and not self._answers:
            wait([future for future, _ in self._awaited.values()], timeout=wait_seconds, return_when=FIRST_COMPLETED)
        for lane, (future, first) in list(self._awaited.items()):
            if future.done():
                del self._awaited[lane]
                self._answer(lane, future.result, first=first)
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        """See `Environments.close`: end the thread of coroutines."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    def _call(self, lane: int, method: Callable[[], Any], *, first: bool) -> None:
        try:
            answer = method()
        except Exception as error:
            self._fail(lane, error)
            return
        if inspect.iscoroutine(answer):
            self._awaited[lane] = asyncio.run_coroutine_threadsafe(answer, self._running_loop()), first
        else:
            self._answer(lane, lambda: answer, first=first)

    def _answer(self, lane: int, result: Callable[[], Any], *, first: bool) -> None:
        try:
            answer = as_step(result(), first=first)
        except Exception as error:
            self._fail(lane, error)
            return
        if isinstance(answer, EnvironmentFault):
            self._playing.pop(lane, None)
        self._answers.append((lane, answer))

    def _fail(self, lane: int, error: Exception) -> None:
        self._playing.pop(lane, None)
        self._answers.append((lane, EnvironmentFault(reason=f"{type(error).__name__}: {error}"[:300])))

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="environments", daemon=True).start()
        return self._loop
