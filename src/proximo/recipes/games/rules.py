"""A game as rules: where it starts, which moves are legal, what may follow a move. And the two uses of them.

`Game` plays the rules turn by turn, as an environment. `exact_scores` enumerates them: the scores of the best and of
random play come from the very rules that a policy meets.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from random import Random
from typing import Any, Literal, NamedTuple


@dataclass(frozen=True, slots=True)
class Outcome:
    """A place where a game may start, or one of the things that may follow a move."""

    state: Any
    """All that the rules need to go on, hashable. The player may not know all of it."""
    text: str
    """What the player reads. With the texts before it, it is all that the player knows."""
    reward: float = 0.0
    end: Literal["", "terminated", "truncated"] = ""
    """Truncated is a game that its limit of turns ends, not its rules."""
    weight: int = 1
    """Its chance is its share of the weights of all outcomes."""


class Game:
    """A game against chance or a fixed opponent, in the text form of Gymnasium's protocol.

    Chance is drawn from the seed of `reset` alone. A text that is no legal move is answered by a hint; the game is
    given up after `max_malformed` of them, with the reward `forfeit`.
    """

    hint: str
    """What a move looks like."""
    max_malformed = 3
    forfeit = 0.0

    def starts(self) -> Sequence[Outcome]:
        """Where a game may start."""
        raise NotImplementedError

    def moves(self, state: Any) -> Sequence[str]:
        """The legal moves, from which a random player draws. They follow from what the player knows."""
        raise NotImplementedError

    def play(self, state: Any, move: str) -> Sequence[Outcome]:
        """What may follow a legal move."""
        raise NotImplementedError

    def read(self, state: Any, text: str) -> str | None:
        """The move that a text of the player means; None if it means none."""
        move = text.strip()
        return move if move in self.moves(state) else None

    def deal(self, random: Random) -> Outcome:
        """One of the starts, drawn by its probability."""
        return _draw(random, self.starts())

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Start the game of a seed. The rows of the data only say how many games an epoch has."""
        del row
        self._random, self._malformed = Random(seed), 0
        start = self.deal(self._random)
        self.state = start.state
        return start.text, {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Answer a text of the player by observation, reward, terminated, truncated, info."""
        move = self.read(self.state, text)
        if move is None:
            self._malformed += 1
            gives_up = self._malformed == self.max_malformed
            return f"{self.hint}\n", self.forfeit * gives_up, gives_up, False, {"malformed_moves": self._malformed}
        found = _draw(self._random, self.play(self.state, move))
        self.state = found.state
        terminated, truncated = found.end == "terminated", found.end == "truncated"
        return found.text, found.reward, terminated, truncated, {"malformed_moves": self._malformed}


def _draw(random: Random, outcomes: Sequence[Outcome]) -> Outcome:
    return random.choices(outcomes, [each.weight for each in outcomes])[0]


class ExactScores(NamedTuple):
    """Expected scores of a game, without malformed moves."""

    random: float
    """Of a player who draws every move uniformly from the legal ones."""
    optimum: float
    """Of the best player, who remembers what was shown and knows all chances."""

    def normalised(self, score: float) -> float:
        """0 for random play, 1 for the best."""
        return (score - self.random) / (self.optimum - self.random)


Belief = Mapping[Any, Fraction]
"""The states that are possible after what the player read, with their chances."""


class Solver:
    """Plays a game through: all starts, moves and chances. Every game must end, whatever the moves.

    Dynamic programming over beliefs (Kaelbling, Littman and Cassandra, 1998): a move splits a belief by what the player
    reads after it.
    """

    def __init__(self, game: Game) -> None:
        self.game = game
        self._best: dict[frozenset[tuple[Any, Fraction]], tuple[Fraction, str]] = {}
        self._random: dict[Any, Fraction] = {}

    def scores(self) -> ExactScores:
        """Expected scores over all starts."""
        starts = self.game.starts()
        of_random = sum(share * self.random(start.state) for share, start in _shares(starts))
        of_best = sum(share * self.best(belief)[0] for share, belief in self.start_beliefs().values())
        return ExactScores(float(of_random), float(of_best))

    def start_beliefs(self) -> dict[str, tuple[Fraction, Belief]]:
        """First text -> its chance, and the belief after it."""
        return _split([(Fraction(1), self.game.starts())])[1]

    def random(self, state: Any) -> Fraction:
        """Expected score of random play from a state to the end."""
        if state not in self._random:
            moves = self.game.moves(state)
            following = [pair for move in moves for pair in _shares(self.game.play(state, move))]
            total = sum(share * (Fraction(each.reward) + self._random_after(each)) for share, each in following)
            self._random[state] = Fraction(total) / len(moves)
        return self._random[state]

    def _random_after(self, outcome: Outcome) -> Fraction:
        return Fraction(0) if outcome.end else self.random(outcome.state)

    def best(self, belief: Belief) -> tuple[Fraction, str]:
        """Expected score of the best play from a belief to the end, and its first move."""
        key = frozenset(belief.items())
        if key not in self._best:
            scores = {move: self._score(belief, move) for move in self.game.moves(next(iter(belief)))}
            move = max(scores, key=lambda each: scores[each])
            self._best[key] = (scores[move], move)
        return self._best[key]

    def _score(self, belief: Belief, move: str) -> Fraction:
        reward, after = self.after(belief, move)
        return sum((share * self.best(each)[0] for share, each in after.values()), reward)

    def after(self, belief: Belief, move: str) -> tuple[Fraction, dict[str, tuple[Fraction, Belief]]]:
        """Expected reward of a move; and, where the game goes on, text that is read -> its chance, belief after it."""
        return _split([(chance, self.game.play(state, move)) for state, chance in belief.items()])


def _split(
    cases: Iterable[tuple[Fraction, Sequence[Outcome]]],
) -> tuple[Fraction, dict[str, tuple[Fraction, Belief]]]:
    reward, chances = Fraction(0), defaultdict[str, dict[Any, Fraction]](dict)
    for chance, outcomes in cases:
        for share, each in _shares(outcomes):
            reward += chance * share * Fraction(each.reward)
            if not each.end:
                states = chances[each.text]
                states[each.state] = states.get(each.state, Fraction(0)) + chance * share
    totals = {text: sum(states.values(), Fraction(0)) for text, states in chances.items()}
    return reward, {
        text: (totals[text], {state: chance / totals[text] for state, chance in states.items()})
        for text, states in chances.items()
    }


def _shares(outcomes: Sequence[Outcome]) -> list[tuple[Fraction, Outcome]]:
    total = sum(each.weight for each in outcomes)
    return [(Fraction(each.weight, total), each) for each in outcomes if each.weight]
