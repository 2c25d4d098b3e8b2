"""The record of a plan: memory by phase and part, and work per step. Computed by stages.py, printed by text.py.

A notebook shows it as a box.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from proximo.metrics.notebook.html import Card, Column, Table, card_html
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
class RankCosts:
    """What one of several ranks exchanges in a step, and how long the step takes."""

    num: int
    """Number of ranks."""
    host: int
    """Bytes of a rank in its host's memory."""
    traffic: Mapping[str, Mapping[str, int]]
    """Phase -> kind -> bytes that come to this rank in a step."""
    collectives: Mapping[str, Mapping[str, int]]
    """Phase -> kind -> number of collectives in a step, without those of records."""
    seconds: Mapping[str, float]
    """Phase -> predicted time in a step."""


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
    ranks: RankCosts | None = None
    """None for one rank. Otherwise the phases are those of one of them."""

    def _repr_html_(self) -> str:
        return _html(self)

    @property
    def largest(self) -> Phase:
        """The phase with the highest peak."""
        return max(self.phases, key=lambda phase: phase.peak)

    @property
    def peak(self) -> int:
        """Peak memory of the stage in bytes."""
        return self.largest.peak


class Plans(list[Plan]):
    """The plan of each stage. A notebook shows them as boxes, one below the other."""

    def _repr_html_(self) -> str:
        return "".join(map(_html, self))


def _html(plan: Plan) -> str:
    """Models, the memory of each phase by its parts, and the work of a step."""
    lengths, costs = plan.sequence, plan.ranks
    ranks = "" if costs is None else f", one of {costs.num} ranks"
    roles = [
        (role.name, f"{role.architecture}, {role.parameters:,} parameters, {role.trained:,} trained")
        for role in plan.roles
    ]
    return card_html(
        Card(
            title=f"Plan: {plan.stage} on {plan.device}, {plan.precision}{ranks}",
            status=f"peak {_mib(plan.peak)} MiB in {plan.largest.name}",
            facts=[
                *roles,
                ("every sequence", f"{lengths.prompt:,} + {lengths.response:,} tokens"),
                ("largest micro-batch", f"{plan.microbatch_tokens:,} tokens"),
            ],
            warnings=plan.notes,
            tables=[_table("Memory, MiB", _memory(plan), plan), _table("Work of a step", _work(plan), plan)],
        )
    )


def _memory(plan: Plan) -> dict[str, list[str]]:
    names = dict.fromkeys(part for phase in plan.phases for part in phase.parts)
    parts = {name: [_mib(phase.parts.get(name, 0)) for phase in plan.phases] for name in names}
    return parts | {"all": [_mib(phase.peak) for phase in plan.phases]}


def _work(plan: Plan) -> dict[str, list[str]]:
    rows = {
        "tokens": [f"{phase.tokens:,}" for phase in plan.phases],
        "TFLOP": [f"{phase.flops / 1e12:.3g}" for phase in plan.phases],
    }
    if plan.ranks is not None:
        rows["seconds"] = [f"{plan.ranks.seconds[phase.name]:.2g}" for phase in plan.phases]
    return rows


def _table(title: str, rows: dict[str, list[str]], plan: Plan) -> Table:
    columns = {"": Column.WORDS} | {phase.name: Column.NUMBER for phase in plan.phases}
    return Table(title=title, columns=columns, rows=[(name, *cells) for name, cells in rows.items()])


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f}" if size else "-"
