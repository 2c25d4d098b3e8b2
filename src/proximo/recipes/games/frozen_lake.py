"""FrozenLake on Gymnasium's map of 4 x 4, without slipping: the best play reaches the goal in six moves."""

from proximo.recipes.games.rules import Game, Outcome

MAP = ("SFFF", "FHFH", "FFFH", "HFFG")
MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}


class FrozenLake(Game):
    """Walk from S to G; H is a hole and ends the walk. Score: 1 for the goal, within `turns` moves.

    State: (row, column, moves left). The player reads the place.
    """

    hint = "left, down, right or up"

    def __init__(self, turns: int = 16) -> None:
        self.turns = turns

    def starts(self) -> list[Outcome]:
        return [Outcome((0, 0, self.turns), "0 0\n")]

    def moves(self, state: tuple[int, int, int]) -> list[str]:
        del state  # one may walk against the border
        return list(MOVES)

    def play(self, state: tuple[int, int, int], move: str) -> list[Outcome]:
        row, column, left = state
        down, right = MOVES[move]
        row, column = min(max(row + down, 0), 3), min(max(column + right, 0), 3)
        after, text = (row, column, left - 1), f"{row} {column}\n"
        if MAP[row][column] in "HG":
            return [Outcome(after, text, reward=float(MAP[row][column] == "G"), end="terminated")]
        return [Outcome(after, text, end="" if left > 1 else "truncated")]
