"""Questions about three numbers, and a Python interpreter in the sandbox: the best play writes one line of Python."""

import re
from collections.abc import Sequence
from functools import lru_cache
from random import Random
from typing import NamedTuple

from proximo.recipes.games.rules import Game, Outcome
from proximo_verifiers.sandbox.jobs import Limits, Program
from proximo_verifiers.sandbox.runner import Sandbox

QUESTIONS = {
    "total": "sum([{}])",
    "largest": "max([{}])",
    "smallest": "min([{}])",
    "middle": "sorted([{}])[1]",
    "count": "len([{}])",
}
"""Question -> the expression that answers it."""
ANSWER = re.compile(r"answer (\d{1,9})")
NUMBER = re.compile(r"\d{1,9}")
LIMITS = Limits(cpu_seconds=1.0, wall_seconds=10.0)
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
            right = answer[1] == run(f"print({_expression(state, state.question)})")
            return [Outcome(state, "right\n" if right else "wrong\n", reward=float(right), end="terminated")]
        output = run(move)
        shown = dict.fromkeys((*state.shown, *NUMBER.findall(output)))
        return [Outcome(state._replace(shown=tuple(shown), has_run=True), f"{output}\n")]


def _task(question: str, numbers: Sequence[int]) -> Outcome:
    texts = tuple(map(str, numbers))
    return Outcome(Task(question, texts, texts), f"{question} {','.join(texts)}\n")


def _expression(task: Task, question: str) -> str:
    return QUESTIONS[question].format(",".join(task.numbers))


@lru_cache(10_000)
def _sandbox() -> Sandbox:
    """One for the process; the kernel ends it with the process."""
    return Sandbox()


@lru_cache(10_000)
def run(program: str) -> str:
    """The last line that a program prints, or that its error has; how it ended if it prints neither."""
    outcome = _sandbox().run(Program(source=program, limits=LIMITS))
    lines = (outcome.stdout.strip() or outcome.stderr.strip()).decode(errors="replace").splitlines()
    return lines[-1][:SHOWN_CHARACTERS] if lines else outcome.ending.value
