"""The record of a plan: memory by phase and part, and work per step. Made by profiling.py, printed by text.py."""

from collections.abc import Mapping
from dataclasses import dataclass

from proximo.plan.cost_model import Lengths


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """A model of the run and its parameter counts."""

    name: str
    architecture: str
    parameters: int
    shared: int
    """Parameters that it shares with roles listed before it."""
    trained: int
    """Trainable parameters, shared ones excluded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A phase of a step, named as in the metrics."""

    name: str
    parts: Mapping[str, int]
    """Part -> bytes at the phase's memory peak."""
    tokens: int
    """Tokens that all passes of one step process."""
    flops: int
    """Floating-point operations in one step."""

    @property
    def peak(self) -> int:
        """Peak memory of this phase in bytes."""
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The plan of one stage."""

    stage: str
    """The name of its trainer and of the trainer's section in the recipe."""
    trained: tuple[str, ...]
    """Recipe keys of the trained models."""
    device: str
    precision: str
    roles: tuple[Role, ...]
    phases: tuple[Phase, ...]
    sequence: Lengths
    """Assumed lengths of every sequence: the maximum that the recipe and the model allow."""
    microbatch_tokens: int
    """Tokens of the largest training micro-batch, with sequences of that length."""
    token_budget: int
    """Maximum number of tokens in a micro-batch of shorter sequences."""
    notes: tuple[str, ...] = ()
    """Sentences about costs that the plan does not count."""
    num_ranks: int = 1
    """The phases are those of one of so many ranks."""
    host_bytes: int = 0
    """Of several ranks: bytes of one of them in its host's memory."""

    @property
    def largest(self) -> Phase:
        """The phase with the highest peak."""
        return max(self.phases, key=lambda phase: phase.peak)

    @property
    def peak(self) -> int:
        """Peak memory of the stage in bytes."""
        return self.largest.peak
