"""Nim against an opponent who never errs: the best play leaves heaps whose binary digits cancel out."""

from functools import reduce
from itertools import product
from operator import xor

from proximo.recipes.games.rules import Game, Outcome

Heaps = tuple[int, ...]


class Nim(Game):
    """Take any number from one heap; who takes the last wins. Score: 1 for a win.

    The game starts where the first player, which is the policy, can win, so the first error loses it. State: the heaps.
    A move is a heap and a number, such as `b2`.
    """

    hint = "a heap and a number, such as a1"

    def __init__(self, heaps: int = 3, largest: int = 3) -> None:
        self.heaps, self.largest = heaps, largest

    def starts(self) -> list[Outcome]:
        deals = product(range(self.largest + 1), repeat=self.heaps)
        return [Outcome(heaps, self._text(heaps)) for heaps in deals if _can_win(heaps)]

    def moves(self, state: Heaps) -> list[str]:
        return [f"{'abcdefgh'[heap]}{number}" for heap, size in enumerate(state) for number in range(1, size + 1)]

    def play(self, state: Heaps, move: str) -> list[Outcome]:
        left = self._take(state, move)
        if not any(left):
            return [Outcome(left, "you win\n", reward=1.0, end="terminated")]
        answers = [self._take(left, each) for each in self.moves(left)]
        winning = [each for each in answers if not _can_win(each)]
        return [
            Outcome(each, self._text(each)) if any(each) else Outcome(each, "you lose\n", end="terminated")
            for each in winning or answers
        ]

    def _take(self, heaps: Heaps, move: str) -> Heaps:
        taken = "abcdefgh".index(move[0])
        return tuple(size - int(move[1:]) * (heap == taken) for heap, size in enumerate(heaps))

    def _text(self, heaps: Heaps) -> str:
        return " ".join(map(str, heaps)) + "\n"


def _can_win(heaps: Heaps) -> bool:
    """Whether the player to move wins with the best play (C. Bouton, 1901)."""
    return reduce(xor, heaps) != 0
