"""What an environment is: a class with `reset` and `step` on texts, in the form of Gymnasium. What it answers.

Imports no torch, so that worker processes and the modules of environments can import it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Observation = str | Sequence[Mapping[str, Any]]
"""What the policy reads: a text, or messages for the chat template."""


class Environment(Protocol):
    """A world that the policy acts in by writing. Both methods may be coroutines.

    One object plays one episode at a time, and may be asked to reset again. An exception is a fault of the environment:
    the trajectory is left out of training, and counted.
    """

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> tuple[Observation, Mapping[str, Any]]:
        """Begin an episode. All samples of one prompt get the same `seed` and the same `row` of the data.

        `info["tools"]`, if there is one: JSON schemas of tools for the chat template.
        """
        ...

    def step(self, text: str) -> tuple[Observation, float, bool, bool, Mapping[str, Any]]:
        """Act on what the policy wrote: observation, reward, terminated, truncated, info.

        Terminated: the episode is over, and what follows is worth 0. Truncated: it was cut, and might have gone on.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentStep:
    """What an environment answered to a reset (reward 0) or to a step."""

    observation: Observation
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    """Wall-clock time that the environment took."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentFault:
    """An environment gave no answer: it raised an error, ran past its deadline, died, or answered with wrong types."""

    reason: str
    """One line for people."""
    kind: str = "error"
    """One word for counts: `error` (it raised), `timeout`, `died`, `memory`, `invalid` (a wrong type or size)."""
