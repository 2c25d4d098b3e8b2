"""Kuhn poker against a fixed opponent: the best play is the best response to it, not an equilibrium."""

from typing import NamedTuple

from proximo.recipes.games.rules import Game, Outcome

CARDS = "JQK"
BETS = {"J": 3, "Q": 2, "K": 4}
"""The opponent's card -> in how many of 4 cases it bets where nobody has."""
CALLS = {"J": 0, "Q": 3, "K": 4}
"""The opponent's card -> in how many of 4 cases it calls a bet."""


class Hand(NamedTuple):
    card: str
    other: str
    said: str
    """What was said so far: `c` for a check, `b` for a bet, in turn."""


class Kuhn(Game):
    """Three cards, a stake of 1 each, one bet of 1 (H. Kuhn, 1950). Score: what is won or lost, from -2 to 2.

    Half of the games are begun by the opponent, who bluffs too often. State: the hand.
    """

    hint = "check, bet, call or fold"
    forfeit = -2.0

    def starts(self) -> list[Outcome]:
        deals = [(card, other) for card in CARDS for other in CARDS if card != other]
        begins = [Outcome(Hand(*deal, ""), f"{deal[0]} first\n", weight=4) for deal in deals]
        for card, other in deals:
            begins += [
                Outcome(Hand(card, other, "b"), f"{card} bet\n", weight=BETS[other]),
                Outcome(Hand(card, other, "c"), f"{card} check\n", weight=4 - BETS[other]),
            ]
        return begins

    def moves(self, state: Hand) -> list[str]:
        return ["fold", "call"] if state.said.endswith("b") else ["check", "bet"]

    def play(self, state: Hand, move: str) -> list[Outcome]:
        wins = CARDS.index(state.card) > CARDS.index(state.other)
        if move == "fold":
            return [self._end(state, -1)]
        if move == "call":
            return [self._end(state, 2 if wins else -2)]
        if move == "bet":
            calls = CALLS[state.other]
            return [self._end(state, 2 if wins else -2, calls), self._end(state, 1, 4 - calls)]
        if state.said:
            return [self._end(state, 1 if wins else -1)]
        bets = BETS[state.other]
        return [Outcome(state._replace(said="cb"), "bet\n", weight=bets), self._end(state, 1 if wins else -1, 4 - bets)]

    def _end(self, state: Hand, won: int, weight: int = 1) -> Outcome:
        return Outcome(state, f"{won:+d}\n", reward=float(won), end="terminated", weight=weight)
