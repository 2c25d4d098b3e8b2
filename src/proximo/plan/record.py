"""The record of a plan: memory by phase and part, and work per step. Not how it is found, nor how it is shown."""

from collections.abc import Mapping
from dataclasses import dataclass

from proximo.plan.cost_model import Lengths


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """A model of the run."""

    name: str
    architecture: str
    parameters: int
    shared: int
    """Of these, those that roles named before it hold already."""
    trained: int
    """Of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A stretch of a step, named as in the metrics."""

    name: str
    parts: Mapping[str, int]
    """Bytes by part at the moment when most is held."""
    tokens: int
    """Read or written in all passes of one step."""
    flops: int
    """In one step."""

    @property
    def peak(self) -> int:
        """Bytes."""
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Of one stage."""

    stage: str
    """The name of its trainer, which is that of its section in the recipe."""
    trained: tuple[str, ...]
    """Keys of the models that learn."""
    device: str
    precision: str
    roles: tuple[Role, ...]
    phases: tuple[Phase, ...]
    sequence: Lengths
    """What every sequence is taken to be: as long as the recipe and the model allow."""
    microbatch_tokens: int
    """Of the largest training micro-batch, if every sequence is as long as that."""
    token_budget: int
    """What a micro-batch of shorter sequences may hold."""
    notes: tuple[str, ...] = ()
    """What the run does that is not in these numbers."""

    @property
    def largest(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.peak)

    @property
    def peak(self) -> int:
        """Bytes."""
        return self.largest.peak
