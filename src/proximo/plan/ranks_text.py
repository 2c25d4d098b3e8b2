"""Prints what a plan for several ranks has beside that for one: traffic and time."""

from collections.abc import Iterator, Sequence
from typing import Any

from proximo.plan.record import Plan, RankCosts

GIB = 2**30


def describe_ranks(plan: Plan) -> str:
    """Traffic and time of one rank by phase, below the table of its memory. Empty for one rank."""
    return "\n".join(_lines(plan, plan.ranks)) if plan.ranks else ""


def ranks_to_json(plan: Plan) -> dict[str, Any]:
    """What `proximo plan --json` adds for several ranks."""
    costs = plan.ranks
    if costs is None:
        return {}
    phases = {
        name: {
            "received_bytes": dict(costs.traffic[name]),
            "collectives": dict(costs.collectives[name]),
            "seconds": costs.seconds[name],
        }
        for name in costs.seconds
    }
    return {"ranks": {"num": costs.num, "host_bytes": costs.host, "phases": phases}}


def _lines(plan: Plan, costs: RankCosts) -> Iterator[str]:
    widths = {phase.name: max(len(phase.name), 9) for phase in plan.phases}

    def row(name: str, cells: Sequence[str]) -> str:
        columns = "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths.values(), strict=True))
        return f"  {name:<20} {columns}"

    on_host = f"; beside the device, {gib(costs.host)} GiB in the memory of the host" if costs.host else ""
    yield f"  one of {costs.num} ranks{on_host}"
    yield ""
    yield row("received, GiB", list(widths))
    for kind in dict.fromkeys(kind for phase in costs.traffic.values() for kind in phase):
        yield row(kind, [gib(costs.traffic[name].get(kind, 0)) for name in widths])
    yield row("seconds", [f"{costs.seconds[name]:.2g}" for name in widths])


def gib(size: int) -> str:
    return f"{size / GIB:.3g}" if size else "-"
