"""Questions that two documents answer together, and a search: the best play looks up a name, then a city."""

import re
from random import Random
from typing import NamedTuple

from proximo.recipes.games.rules import Game, Outcome

NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eve", "Finn")
CITIES = ("Lima", "Oslo", "Rome", "Turin", "Ulm", "York")
COUNTRIES = ("Arva", "Brel", "Corin", "Dorm", "Elan", "Fran")
WORD = re.compile(r"[A-Z][a-z]+")
RESULTS = 2


class Library(NamedTuple):
    documents: tuple[str, ...]
    solution: str
    shown: tuple[str, ...]
    """Names that the player has read."""
    turns: int
    """Turns that are left."""


class Search(Game):
    """`country of Ann` is solved by `search Ann` (`Ann is in Oslo`), `search Oslo` and `answer Brel`. Score: 1 for it.

    Who is where is dealt anew for every game, so it cannot be learned by heart. The random player searches and answers
    with names that it has read. All deals are alike but for names, so the scores of one are those of all.
    """

    hint = "search Ann or answer Arva"

    def __init__(self, turns: int = 4) -> None:
        self.turns = turns

    def starts(self) -> list[Outcome]:
        return [self.deal(Random(0))]

    def deal(self, random: Random) -> Outcome:
        cities, countries = random.sample(CITIES, len(CITIES)), random.sample(COUNTRIES, len(COUNTRIES))
        documents = [f"{name} is in {city}." for name, city in zip(NAMES, cities, strict=True)]
        documents += [f"{city} is in {country}." for city, country in zip(cities, countries, strict=True)]
        asked = random.randrange(len(NAMES))
        library = Library(tuple(documents), countries[asked], (NAMES[asked],), self.turns)
        return Outcome(library, f"country of {NAMES[asked]}\n")

    def moves(self, state: Library) -> list[str]:
        verbs = ("search", "answer") if state.turns > 1 else ("answer",)
        return [f"{verb} {name}" for verb in verbs for name in state.shown]

    def read(self, state: Library, text: str) -> str | None:
        verb, _, words = (move := text.strip()).partition(" ")
        return move if words and (verb == "answer" or (verb == "search" and state.turns > 1)) else None

    def play(self, state: Library, move: str) -> list[Outcome]:
        verb, _, words = move.partition(" ")
        if verb == "answer":
            right = words == state.solution
            return [Outcome(state, "right\n" if right else "wrong\n", reward=float(right), end="terminated")]
        text = " ".join(found(words, state.documents)) or "nothing"
        shown = tuple(dict.fromkeys((*state.shown, *WORD.findall(text))))
        return [Outcome(state._replace(shown=shown, turns=state.turns - 1), f"{text}\n")]


def found(words: str, documents: tuple[str, ...]) -> list[str]:
    """The documents with most of the words, at most two; the first ones of equals."""
    wanted = set(WORD.findall(words))
    hits = {document: len(wanted & set(WORD.findall(document))) for document in documents}
    return sorted((each for each in documents if hits[each]), key=lambda each: -hits[each])[:RESULTS]
