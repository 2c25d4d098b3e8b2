"""Problems with numbers of two digits, and a calculator: the best play asks it and repeats what it says."""

import re
from collections.abc import Sequence
from itertools import permutations, product
from operator import add, mul, sub
from random import Random
from typing import NamedTuple

from proximo.recipes.games.rules import Game, Outcome

OPERATORS = {"+": add, "-": sub, "*": mul}
NUMBER = r"(-?\d{1,9})"
CALL = re.compile(rf"calc {NUMBER}([-+*]){NUMBER}")
ANSWER = re.compile(rf"answer {NUMBER}")


class Sheet(NamedTuple):
    """What is on the table."""

    numbers: tuple[int, ...]
    """Those of the problem, then each result."""
    solution: int
    turns: int
    """Left, the answer included."""


class Calculator(Game):
    """`12*34` is solved by `calc 12*34` and `answer 408`. Score: 1 for the right answer.

    With more `terms` (`12*34-5`, from left to right) the calculator is needed once for each operator. The random player
    takes numbers that were shown.
    """

    hint = "calc 1+2 or answer 3"

    def __init__(self, terms: int = 2, smallest: int = 11, largest: int = 50) -> None:
        self.terms, self.smallest, self.largest = terms, smallest, largest

    def starts(self) -> list[Outcome]:
        numbers = product(range(self.smallest, self.largest + 1), repeat=self.terms)
        return [self._problem(each, signs) for each in numbers for signs in product(OPERATORS, repeat=self.terms - 1)]

    def deal(self, random: Random) -> Outcome:
        numbers = tuple(random.randint(self.smallest, self.largest) for _ in range(self.terms))
        return self._problem(numbers, random.choices(list(OPERATORS), k=self.terms - 1))

    def _problem(self, numbers: Sequence[int], signs: Sequence[str]) -> Outcome:
        text, solution = str(numbers[0]), numbers[0]
        for sign, number in zip(signs, numbers[1:], strict=True):
            text, solution = f"{text}{sign}{number}", OPERATORS[sign](solution, number)
        return Outcome(Sheet(tuple(numbers), solution, self.terms), f"{text}\n")

    def moves(self, state: Sheet) -> list[str]:
        answers = [f"answer {number}" for number in state.numbers]
        pairs = permutations(state.numbers, 2) if state.turns > 1 else ()
        return answers + [f"calc {first}{sign}{second}" for first, second in pairs for sign in OPERATORS]

    def read(self, state: Sheet, text: str) -> str | None:
        move = text.strip()
        return move if ANSWER.fullmatch(move) or (state.turns > 1 and CALL.fullmatch(move)) else None

    def play(self, state: Sheet, move: str) -> list[Outcome]:
        if answer := ANSWER.fullmatch(move):
            right = int(answer[1]) == state.solution
            return [Outcome(state, "right\n" if right else "wrong\n", reward=float(right), end="terminated")]
        call = CALL.fullmatch(move)
        assert call is not None
        result = OPERATORS[call[2]](int(call[1]), int(call[3]))
        return [Outcome(Sheet((*state.numbers, result), state.solution, state.turns - 1), f"{result}\n")]
