"""The environments of GEM, which have Gymnasium's form and texts."""

from collections.abc import Mapping
from typing import Any

from proximo.environments.adapters import package

gem = package("gem", "gem")


class Gem:
    """An environment of GEM, by its id."""

    def __init__(self, id: str, kwargs: Mapping[str, Any]) -> None:
        self._environment = gem.make(id, **kwargs)

    def reset(self, seed: int, row: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """Begins an episode. GEM seeds the random numbers of the whole process."""
        return self._environment.reset(seed=seed % 2**32)

    def step(self, text: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        """Acts with the text of the turn. GEM answers in the form of Gymnasium."""
        observation, reward, terminated, truncated, info = self._environment.step(text)
        return observation, float(reward), terminated, truncated, info
