"""A plan: memory by phase and part, and work per step; as a table or JSON, with advice where it does not fit."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from proximo.plan.cost_model import CACHE, LOGITS, Lengths
from proximo.plan.fake_tensor_profiler import ACTIVATIONS, GRADIENTS, WORKING


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """A model of the run and its parameter counts."""

    name: str
    architecture: str
    parameters: int
    shared_parameters: int
    """Parameters that it shares with roles listed before it."""
    trained_parameters: int
    """Trainable parameters, shared ones excluded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A phase of a step, named as in the metrics."""

    name: str
    parts_bytes: Mapping[str, int]
    """Part -> bytes at the phase's memory peak."""
    tokens_per_step: int
    """Tokens that all passes of one step process."""
    flops_per_step: int
    """Floating-point operations in one step."""

    @property
    def peak(self) -> int:
        """Peak memory of this phase in bytes."""
        return sum(self.parts_bytes.values())


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
    sequence_tokens: Lengths
    """Assumed lengths of every sequence: the maximum that the recipe and the model allow."""
    microbatch_tokens: int
    """Tokens of the largest training micro-batch, with sequences of that length."""
    token_budget: int
    """Maximum number of tokens in a micro-batch of shorter sequences."""
    notes: tuple[str, ...] = ()
    """Sentences about costs that the plan does not count."""
    num_ranks: int = 1
    """Number of ranks. The phases are those of one rank."""
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


MIB = 2**20
RANK_BYTES = "its shards + what is gathered + gradients + its share of activations, logits and KV cache"
"""The formula of a rank's bytes in words; the table has each term."""
_WIDTH = 20


class Plans(list[Plan]):
    """The plan of each stage. It is shown as the text that `proximo plan` prints."""

    def __repr__(self) -> str:
        return "\n\n".join(describe(plan, memory=None) for plan in self)


def describe(plan: Plan, *, memory: int | None, process: int = 0) -> str:
    """The plan as text: roles, memory by phase and part, work by phase.

    `memory`: bytes of the machine, None if unknown. `process`: bytes that the process holds before a run.
    """
    return "\n".join(_lines(plan, memory, process))


def to_json(plans: Sequence[Plan], *, process: int = 0) -> list[dict[str, Any]]:
    """Plans as JSON values, with sizes in bytes. The output of `proximo plan --json`."""
    found = []
    for plan in plans:
        phases = [asdict(phase) | {"peak_bytes": phase.peak} for phase in plan.phases]
        own = {"peak_bytes": plan.peak, "peak_phase": plan.largest.name, "process_bytes": process, "phases": phases}
        found.append(asdict(plan) | own)
    return json.loads(json.dumps(found))


def _lines(plan: Plan, memory: int | None, process: int) -> Iterator[str]:
    yield f"{plan.stage} on {plan.device}, {plan.precision}"
    for role in plan.roles:
        shared = f", {role.shared_parameters:,} of them shared" if role.shared_parameters else ""
        count = f"{role.parameters:,} parameters{shared}, {role.trained_parameters:,} trained"
        yield f"  {role.name:<{_WIDTH}} {role.architecture}, {count}"
    lengths = plan.sequence_tokens
    yield (
        f"  {'every sequence':<{_WIDTH}} {lengths.prompt:,} + {lengths.response:,} tokens, "
        f"{plan.microbatch_tokens:,} in the largest micro-batch"
    )
    if plan.microbatch_tokens < plan.token_budget:
        yield f"  {'':<{_WIDTH}} shorter ones may fill a micro-batch further, up to {plan.token_budget:,} tokens"
    yield ""
    yield from _table(plan.phases)
    yield ""
    if plan.num_ranks > 1:
        on_host = f"; beside the device, {_size(plan.host_bytes)} in the memory of the host" if plan.host_bytes else ""
        yield f"  one of {plan.num_ranks} ranks: {RANK_BYTES}{on_host}"
        yield ""
    own = f" + {_mib(process)} MiB of the process with its libraries" if process else ""
    yield f"  peak {_size(plan.peak)} in {plan.largest.name}{own}" + _of_memory(plan.peak + process, memory)
    if memory is not None and plan.peak + process > memory:
        yield f"  more than the machine has; {advice(plan)}"
    yield from (f"  note: {note}" for note in plan.notes)


def _table(phases: Sequence[Phase]) -> Iterator[str]:
    widths = [max(len(phase.name), 9) for phase in phases]
    names = list(dict.fromkeys(part for phase in phases for part in phase.parts_bytes))

    def row(name: str, cells: Sequence[str]) -> str:
        columns = "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        return f"  {name:<{_WIDTH}} {columns}"

    yield row("memory, MiB", [phase.name for phase in phases])
    for name in names:
        yield row(name, [_mib(phase.parts_bytes.get(name, 0)) for phase in phases])
    yield row("all", [_mib(phase.peak) for phase in phases])
    yield ""
    yield row("work of a step", [phase.name for phase in phases])
    yield row("tokens", [f"{phase.tokens_per_step:,}" for phase in phases])
    yield row("TFLOP", [f"{phase.flops_per_step / 1e12:.3g}" for phase in phases])


def _of_memory(size: int, memory: int | None) -> str:
    return "" if memory is None else f", {size / memory:.0%} of the machine's {_mib(memory)} MiB"


def _mib(size: int) -> str:
    return f"{size / MIB:,.0f}" if size else "-"


def _size(size: int) -> str:
    return f"{_mib(size)} MiB" + (f" ({size / 2**30:.1f} GiB)" if size >= 2**30 else "")


def advice(plan: Plan) -> str:
    """Keys that lower the largest reducible part of the peak phase."""
    parts, section, models = plan.largest.parts_bytes, plan.stage, plan.trained
    checkpointing = " and ".join(f"{model}.activation_checkpointing" for model in models)
    transient = (*ACTIVATIONS, WORKING, "allocator", *(() if CACHE in parts else (LOGITS,)))
    trained = [name for name in parts if name == GRADIENTS or name.endswith("optimizer")]
    rollout = f"lower {section}.rollout.max_num_seqs or {section}.rollout.max_new_tokens"
    options = {
        f"lower {section}.tokens_per_microbatch, or set {checkpointing}": sum(parts.get(p, 0) for p in transient),
        f"train an adapter ({models[0]}.lora) or fewer layers ({models[0]}.frozen_layers)": sum(
            parts[name] for name in trained
        ),
        **({rollout: parts[CACHE] + parts.get(LOGITS, 0)} if CACHE in parts else {}),
        "take a smaller model": sum(size for name, size in parts.items() if name.endswith("weights")),
    }
    return max(options, key=lambda text: options[text])
