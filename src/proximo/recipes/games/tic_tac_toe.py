"""Tic-tac-toe against an opponent who plays at random."""

from proximo.recipes.games.rules import Game, Outcome

LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]


class TicTacToe(Game):
    """The policy is X and begins. Score: 1 for a win, 0 for a draw, -1 for a loss.

    Squares are 1 to 9, by rows. The player reads the squares that O takes. State: the board, nine of `X`, `O` and `.`.
    """

    hint = "a free square, 1 to 9"
    forfeit = -1.0

    def starts(self) -> list[Outcome]:
        return [Outcome("." * 9, "X\n")]

    def moves(self, state: str) -> list[str]:
        return [str(square + 1) for square in range(9) if state[square] == "."]

    def play(self, state: str, move: str) -> list[Outcome]:
        board = _put(state, "X", move)
        if _has_line(board, "X"):
            return [Outcome(board, "you win\n", reward=1.0, end="terminated")]
        if "." not in board:
            return [Outcome(board, "a draw\n", end="terminated")]
        return [self._answer(_put(board, "O", square), square) for square in self.moves(board)]

    def _answer(self, board: str, square: str) -> Outcome:
        if _has_line(board, "O"):
            return Outcome(board, f"{square}, you lose\n", reward=-1.0, end="terminated")
        return Outcome(board, f"{square}\n")


def _put(board: str, mark: str, square: str) -> str:
    return board[: int(square) - 1] + mark + board[int(square) :]


def _has_line(board: str, mark: str) -> bool:
    return any(all(board[square] == mark for square in line) for line in LINES)
