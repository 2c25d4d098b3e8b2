"""Environments for tests, well-behaved and not. Imports no torch: worker processes import it."""

import asyncio
import os
import random
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Echo:
    """Answers each text with itself and the number of the step; ends with "end" or "cut"."""

    def __init__(self, mark: str | None = None) -> None:
        self.mark = mark
        self.steps = 0

    def reset(self, seed: int, row: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        self.steps = 0
        return f"seed {seed}, row {dict(row)}", {"seed": seed, "process": os.getpid()}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return f"{text} {self.steps}", 0.5, text == "end", text == "cut", {"steps": self.steps}

    def close(self) -> None:
        if self.mark:
            Path(self.mark).touch()


class Async(Echo):
    """The same, with methods that are coroutines and share a lock, which belongs to one event loop."""

    async def reset(self, seed: int, row: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        self.lock = asyncio.Lock()
        async with self.lock:
            await asyncio.sleep(0)
            return super().reset(seed, row)

    async def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        async with self.lock:
            await asyncio.sleep(0)
            return super().step(text)


class Dice:
    """Draws from the random numbers of its whole process, and never seeds them."""

    def reset(self, seed: int, row: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        return str(random.random()), {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return str(random.random()), 0.0, False, False, {}


class Faulty(Echo):
    """Does what it is told to by a step, or by the row of a reset; "raise once" only if the file `begun` is absent."""

    def __init__(self, begun: str = "") -> None:
        super().__init__()
        self.begun = begun
        self.kept: list[bytearray] = []

    def reset(self, seed: int, row: Mapping[str, Any]) -> tuple[Any, Any]:
        super().reset(seed, row)
        return self.act(row.get("do", "")), {"process": os.getpid()}

    def step(self, text: str) -> tuple[Any, Any, Any, Any, Any]:
        observation = self.act(text)
        return observation, *super().step(text)[1:]

    def act(self, do: str) -> Any:
        name, _, rest = do.partition(" ")
        return getattr(self, f"do_{name}")(rest) if name else "began"

    def do_say(self, text: str) -> str:
        return text

    def do_raise(self, text: str) -> str:
        if text == "once":
            if Path(self.begun).exists():
                return "raised before"
            Path(self.begun).touch()
        raise ValueError(f"it broke: {text}")

    def do_leave(self, status: str) -> str:
        os._exit(int(status))

    def do_quit(self, _: str) -> str:
        raise SystemExit(0)

    def do_hang(self, _: str) -> str:
        with Path(self.begun).open("a") as file:
            file.write("!")
        threading.Event().wait()
        return ""

    def do_leak(self, _: str) -> str:
        while True:
            self.kept.append(bytearray(2**20))

    def do_flood(self, _: str) -> str:
        return "x" * (2**22 + 1)

    def do_print(self, _: str) -> str:
        os.write(1, b"x" * 2**24)
        os.write(2, b"x" * 2**24)
        return "printed"

    def do_child(self, _: str) -> str:
        child = subprocess.Popen(["sleep", "10000"])
        return str(child.pid)

    def do_return(self, _: str) -> list[int]:
        return [1, 2]


class Mortal(Echo):
    """Dies in the first step of every episode with an odd seed; pays 1 in the others, and ends."""

    def reset(self, seed: int, row: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        self.is_doomed = seed % 2 == 1
        return super().reset(seed, row)

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self.is_doomed:
            os._exit(9)
        return "", 1.0, True, False, {}


class Broken:
    """Cannot be made."""

    def __init__(self) -> None:
        raise OSError("no such service")


class NoStep:
    """Lacks a method."""

    def reset(self, seed: int) -> str:
        return ""


class Riddle:
    """An environment that asks for a letter, three times at most, and says whether it comes before the hidden one."""

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        self.hidden, self.turns = "abcdefgh"[seed % 8], 0
        return f"{row['prompt'][:2]}?", {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turns += 1
        right, cut = text.startswith(self.hidden), self.turns == 3
        observation = "yes" if right else "up" if text < self.hidden else "down"
        return observation, float(right) - 0.1, right, cut, {"turns": self.turns}


class Counter:
    """A class in TRL's form: its public methods are tools."""

    def __init__(self, step: int = 1) -> None:
        self.step_size = step
        self.total = 0

    def reset(self, start: int = 0, **row: Any) -> str | None:
        self.total = start
        return f" It is {start} now." if start else None

    def add(self, number: int) -> int:
        """
        Add to the counter.

        Args:
            number: What to add.

        Returns:
            The new value.
        """
        if number < 0:
            raise ValueError("only upwards")
        self.total += number * self.step_size
        return self.total

    async def read(self) -> dict[str, int]:
        """Read the counter."""
        return {"total": self.total}

    def get_reward(self) -> float:
        return self.total / 10

    def _hidden(self) -> None:
        raise AssertionError("no tool")


class Unrewarded:
    """Tools of a class that says nothing of a reward."""

    def reset(self, start: int, **row: Any) -> None:
        self.total = start

    @staticmethod
    def add(number: int) -> str:
        """
        Add to the counter.

        Args:
            number: What to add.
        """
        return str(number)


def judged(completions: Any, extra_info: Any) -> list[float]:
    """A reward function that reads a column."""
    return [float(len(each)) for each in completions]


class Undescribed(Counter):
    """Has a tool that says nothing of itself."""

    def guess(self, number: int) -> str:
        return ""


class NoTools:
    """Has nothing but `reset`."""

    def reset(self) -> None:
        return None


def first_free(observation: str) -> str:
    """An opponent in TicTacToe: takes the first free square of those that an observation lists."""
    return "[" + observation.rpartition("Available Moves: '[")[2].partition("]")[0] + "]"
