"""Guess the number: the best play is binary search."""

from proximo.recipes.games.rules import Game, Outcome


class Guess(Game):
    """A number from 1 to `largest`, `turns` guesses, each answered by higher or lower. Score: 1 for the number.

    State: (number, guesses left).
    """

    def __init__(self, largest: int = 7, turns: int = 3) -> None:
        self.largest, self.turns = largest, turns
        self.hint = f"1 to {largest}"

    def starts(self) -> list[Outcome]:
        return [Outcome((number, self.turns), f"1 to {self.largest}\n") for number in range(1, self.largest + 1)]

    def moves(self, state: tuple[int, int]) -> list[str]:
        del state  # a guess that cannot be right is legal
        return [str(number) for number in range(1, self.largest + 1)]

    def play(self, state: tuple[int, int], move: str) -> list[Outcome]:
        number, left = state
        if int(move) == number:
            return [Outcome(state, "right\n", reward=1.0, end="terminated")]
        if left == 1:
            return [Outcome(state, f"it was {number}\n", end="terminated")]
        return [Outcome((number, left - 1), "higher\n" if int(move) < number else "lower\n")]
