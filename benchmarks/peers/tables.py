"""The tables of a comparison: medians, the floor beside them, and ratios to each peer. Measures nothing.

All sides write responses of the same lengths (compare.py checks it), so one floor is everyone's, and seconds compare.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from floor import Lengths, Rates, floor_seconds, flops
from stopwatch import PHASES
from work import Job

Case = Mapping[str, Any]
NOT_SIDES = ("rates", "load")


def print_tables(results: Mapping[str, Case]) -> None:
    """One for each case."""
    for name, case in results.items():
        place = case["about"]
        print(
            f"\n**{name}** — {place['date']}, {place['machine']}, {place['threads']} of {place['cores']} cores, commit "
            f"{place['commit']}, {len(case['rounds'])} rounds\n"
        )
        print("| | rollout, s | scoring, s | training, s | step, s | / floor | rollout tokens/s | peak, MiB | times |")
        print("|---|---|---|---|---|---|---|---|---|")
        for row in rows(case):
            print("| " + " | ".join(row) + " |")
        print(f"\n{notes(case)}")


def rows(case: Case) -> list[list[str]]:
    """A line for the floor and for each side; `times` is the side's step in steps of Proximo."""
    floor = median_floor(case)
    whole, tokens = sum(floor.values()), sum(lengths_of(case).responses)
    lines = [["floor", *(f"{floor[phase]:.2f}" for phase in PHASES), f"{whole:.2f}", "1", "", "", ""]]
    ours = medians(case, "proximo")["step"] if "proximo" in sides(case) else None
    for side in sides(case):
        seconds = medians(case, side)
        lines.append(
            [
                side,
                *(f"{seconds[phase]:.2f}" if seconds[phase] else "" for phase in PHASES),
                f"{seconds['step']:.2f}",
                f"{seconds['step'] / whole:.2f}",
                f"{tokens / seconds['rollout']:.0f}" if seconds["rollout"] else "",
                f"{statistics.median(taken[side]['peak_mib'] for taken in case['rounds']):.0f}",
                "" if ours is None else f"{seconds['step'] / ours:.2f}",
            ]
        )
    return lines


def sides(case: Case) -> list[str]:
    """Proximo first."""
    names = [name for name in case["rounds"][0] if name not in NOT_SIDES]
    return sorted(names, key=lambda name: (name != "proximo", name))


def steps(case: Case, side: str) -> list[Mapping[str, Any]]:
    """Of all rounds."""
    return [step for taken in case["rounds"] for step in taken[side]["steps"]]


def medians(case: Case, side: str) -> dict[str, float]:
    """Seconds of each phase, and of the whole step. A phase that a side did not tell apart is in the next one."""
    taken = [{phase: step.get(phase, 0.0) for phase in PHASES} for step in steps(case, side)]
    found = {phase: statistics.median(step[phase] for step in taken) for phase in PHASES}
    return found | {"step": statistics.median(sum(step.values()) for step in taken)}


def lengths_of(case: Case) -> Lengths:
    """Of every step of every side."""
    job = Job(**case["job"])
    prompts = [len(prompt) for prompt in job.prompts() for _ in range(job.group)]
    return Lengths(prompts=prompts, responses=job.response_lengths() or [])


def median_floor(case: Case) -> dict[str, float]:
    """Over the rounds, each with its own rates."""
    job, lengths = Job(**case["job"]), lengths_of(case)
    found = [floor_seconds(job, lengths, Rates(**taken["rates"])) for taken in case["rounds"]]
    return {phase: statistics.median(each[phase] for each in found) for phase in PHASES}


def notes(case: Case) -> str:
    """Of the floor, the lengths, the load and the versions."""
    lengths, first = lengths_of(case), case["rounds"][0]
    rates = [taken["rates"]["best"] / 1e9 for taken in case["rounds"]]
    versions: Sequence[str] = [
        f"{side}: " + ", ".join(f"{name} {number}" for name, number in first[side]["versions"].items())
        for side in sides(case)
    ]
    loads = ", ".join(f"{taken['load']:.1f}" for taken in case["rounds"])
    return (
        f"{flops(Job(**case['job']), lengths) / 1e9:.1f} GFLOP of matrices, best rate {min(rates):.0f} to "
        f"{max(rates):.0f} GFLOP/s. Mean response {statistics.mean(lengths.responses):.1f} tokens, the same lengths on "
        f"every side. Load before the rounds: {loads}. " + "; ".join(versions) + "."
    )
