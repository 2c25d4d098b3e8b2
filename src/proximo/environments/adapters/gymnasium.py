"""Environments registered with Gymnasium that are played in texts, or in numbers, such as FrozenLake."""

import re
from collections.abc import Mapping
from typing import Any

from proximo.environments.adapters import package
from proximo.errors import ConfigError

gymnasium = package("gymnasium", "gymnasium")


class Gymnasium:
    """Actions are the policy's texts; for a space of numbers, the last whole number in one.

    An observation that is no text is shown as the environment renders it (`render_mode="ansi"`), or as it prints.
    """

    def __init__(self, id: str, instructions: str, kwargs: Mapping[str, Any]) -> None:
        self._environment = gymnasium.make(id, disable_env_checker=True, **kwargs)
        self._space, self._instructions = self._environment.action_space, instructions
        if not isinstance(self._space, gymnasium.spaces.Text | gymnasium.spaces.Discrete):
            raise ConfigError(f"the actions of {id} are {self._space}, not texts or numbers: wrap it in your class")

    def reset(self, seed: int, row: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """Begins an episode. The row becomes the options of the environment."""
        observation, info = self._environment.reset(seed=seed, options=dict(row))
        return self._instructions + self._shown(observation), info

    def step(self, text: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        """Acts. A text without a number of the space changes nothing: the policy is told so."""
        action = text if isinstance(self._space, gymnasium.spaces.Text) else self._number(text)
        if action is None:
            first, last = self._space.start, self._space.start + self._space.n - 1
            return f"Write a number from {first} to {last}.", 0.0, False, False, {"malformed_actions": 1}
        observation, *rest = self._environment.step(action)
        return self._shown(observation), *rest

    def _number(self, text: str) -> int | None:
        numbers = [int(each) for each in re.findall(r"(?<!\d)-?\d{1,18}(?!\d)", text)]
        return numbers[-1] if numbers and self._space.contains(numbers[-1]) else None

    def _shown(self, observation: Any) -> str:
        rendered = self._environment.render() if self._environment.render_mode == "ansi" else None
        return observation if isinstance(observation, str) else str(observation if rendered is None else rendered)
