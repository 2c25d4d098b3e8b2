"""Questions about three numbers, and a Python interpreter in the sandbox: the best play writes one line of Python."""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from random import Random
from typing import NamedTuple

from proximo.recipes.games.rules import Game, Outcome
from proximo_verifiers.sandbox.jobs import Ending, Limits, Program
from proximo_verifiers.sandbox.runner import Sandbox

QUESTIONS: dict[str, tuple[str, Callable[[Sequence[int]], int]]] = {
    "total": ("sum([{}])", sum),
    "largest": ("max([{}])", max),
    "smallest": ("min([{}])", min),
    "middle": ("sorted([{}])[1]", lambda numbers: sorted(numbers)[1]),
    "count": ("len([{}])", len),
}
"""Question -> the expression that answers it, and the answer itself."""
ANSWER = re.compile(r"answer (\d{1,9})")
NUMBER = re.compile(r"\d{1,9}")
LIMITS = Limits(cpu_seconds=1.0, idle_seconds=2.0, wall_seconds=60.0)
SHOWN_CHARACTERS = 60


class Task(NamedTuple):
    question: str
    numbers: tuple[str, ...]
    shown: tuple[str, ...]
    """Numbers that the player has read."""
    has_run: bool = False


class PythonTool(Game):
    """`largest 23,71,40` is solved by `print(max([23,71,40]))` and `answer 71`. Score: 1 for the right answer.

    One program, of any kind, then the answer. The random player asks one of the five questions, and answers with a
    number that it has read. Deals differ in numbers alone, so the scores of one are those of all.
    """

    hint = "a program, or answer 1"

    def starts(self) -> list[Outcome]:
        return [_task(question, (23, 71, 40)) for question in QUESTIONS]

    def deal(self, random: Random) -> Outcome:
        return _task(random.choice(list(QUESTIONS)), random.sample(range(11, 100), 3))

    def moves(self, state: Task) -> list[str]:
        answers = [f"answer {number}" for number in state.shown]
        return answers if state.has_run else answers + [f"print({_expression(state, each)})" for each in QUESTIONS]

    def read(self, state: Task, text: str) -> str | None:
        move = text.strip()
        return move if ANSWER.fullmatch(move) or (move and not state.has_run) else None

    def play(self, state: Task, move: str) -> list[Outcome]:
        if answer := ANSWER.fullmatch(move):
            right = int(answer[1]) == QUESTIONS[state.question][1](list(map(int, state.numbers)))
            return [Outcome(state, "right\n" if right else "wrong\n", reward=float(right), end="terminated")]
        output = run(move)
        shown = dict.fromkeys((*state.shown, *NUMBER.findall(output)))
        return [Outcome(state._replace(shown=tuple(shown), has_run=True), f"{output}\n")]


def _task(question: str, numbers: Sequence[int]) -> Outcome:
    texts = tuple(map(str, numbers))
    return Outcome(Task(question, texts, texts), f"{question} {','.join(texts)}\n")


def _expression(task: Task, question: str) -> str:
    return QUESTIONS[question][0].format(",".join(task.numbers))


@lru_cache(10_000)
def _sandbox() -> Sandbox:
    """One for the process; the kernel ends it with the process."""
    return Sandbox()


@lru_cache(10_000)
def run(program: str) -> str:
    """The last line that a program prints, or that its error has; how it ended if it prints neither.

    Raises RuntimeError for one that the clock ended, which says more of the machine than of the program.
    """
    outcome = _sandbox().run(Program(source=program, limits=LIMITS))
    if outcome.ending is Ending.WALL:
        raise RuntimeError(f"a program ran for {LIMITS.wall_seconds:g} seconds, most of which the machine was busy")
    lines = (outcome.stdout.strip() or outcome.stderr.strip()).decode(errors="replace").splitlines()
    return lines[-1][:SHOWN_CHARACTERS] if lines else outcome.ending.value
