"""The games of TextArena, alone or against an opponent."""

from collections.abc import Mapping
from typing import Any

from proximo.environments.adapters import package
from proximo.environments.players.player import imported

textarena = package("textarena", "textarena")


class TextArena:
    """A game by its id. With an opponent, a function from observation to action, the seed says who begins."""

    def __init__(self, id: str, opponent: str | None, kwargs: Mapping[str, Any]) -> None:
        self._id, self._kwargs = id, dict(kwargs)
        self._opponent = None if opponent is None else imported(opponent)
        self.reset(0, {})  # a game that lacks its words or has more players is an error before the first episode

    def reset(self, seed: int, row: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """Begins a game. TextArena seeds the random numbers of the whole process."""
        self._game = textarena.make(self._id, **self._kwargs)  # another one: wrappers keep what they saw of the last
        self._seat, self._seen = (0 if self._opponent is None else seed % 2), ""
        self._game.reset(num_players=1 if self._opponent is None else 2, seed=seed)
        return self._played_on(done=False), {}

    def step(self, text: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        """Acts, and has the opponent act until it is the policy's turn again."""
        done, info = self._game.step(action=text)
        observation = self._played_on(done)
        if not self._game.state.done:
            return observation, 0.0, False, False, info
        rewards, infos = self._game.close()
        return observation, float(rewards[self._seat]), True, False, infos[self._seat]

    def _played_on(self, done: bool) -> str:
        player, shown = self._game.get_observation()
        while not done and player != self._seat:
            assert self._opponent is not None
            done, _ = self._game.step(action=self._opponent(shown))
            player, shown = self._game.get_observation()
        if done:
            return ""
        news, self._seen = shown.removeprefix(self._seen), shown  # many wrappers show all that was said so far
        return news.lstrip("\n")
