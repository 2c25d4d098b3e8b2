"""The tables of a comparison: medians, the floor beside them, and ratios to each peer. Measures nothing."""

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
    """A line for the floor and for each side; `times` is how often Proximo's step fits into the side's, per token."""
    floor = median_floor(case)
    total = sum(floor.values())
    lines = [["floor", *(f"{floor[phase]:.2f}" for phase in PHASES), f"{total:.2f}", "1", "", "", ""]]
    ours = per_token(case, "proximo") if "proximo" in sides(case) else None
    for side in sides(case):
        seconds = medians(case, side)
        own_floor = total * tokens(case, side) / floor_tokens(case)
        lines.append(
            [
                side,
                *(f"{seconds[phase]:.2f}" for phase in PHASES),
                f"{seconds['step']:.2f}",
                f"{seconds['step'] / own_floor:.2f}",
                f"{tokens(case, side) / seconds['rollout']:.0f}",
                f"{statistics.median(taken[side]['peak_mib'] for taken in case['rounds']):.0f}",
                "" if ours is None else f"{per_token(case, side) / ours:.2f}",
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
    """Seconds of each phase, and of the whole step."""
    taken = steps(case, side)
    found = {phase: statistics.median(step[phase] for step in taken) for phase in PHASES}
    return found | {"step": statistics.median(sum(step[phase] for phase in PHASES) for step in taken)}


def tokens(case: Case, side: str) -> float:
    """Response tokens of a step; sides draw other samples, and so other lengths."""
    return statistics.mean(step["response_tokens"] for step in steps(case, side))


def per_token(case: Case, side: str) -> float:
    """Seconds of a step per response token."""
    return medians(case, side)["step"] / tokens(case, side)


def floor_lengths(case: Case) -> list[Lengths]:
    """Of Proximo's steps where it took part; else as if every response had the mean length of the first side."""
    job = Job(**case["job"])
    prompts = [len(prompt) for prompt in job.prompts() for _ in range(job.group)]
    if "proximo" in sides(case):
        return [Lengths(prompts=prompts, responses=step["lengths"]) for step in steps(case, "proximo")]
    mean = round(tokens(case, sides(case)[0]) / job.num_responses)
    return [Lengths(prompts=prompts, responses=[mean] * job.num_responses)]


def floor_tokens(case: Case) -> float:
    """Response tokens of the steps that the floor is of."""
    return statistics.mean(sum(lengths.responses) for lengths in floor_lengths(case))


def median_floor(case: Case) -> dict[str, float]:
    """Over rounds and steps."""
    job = Job(**case["job"])
    found = [
        floor_seconds(job, lengths, Rates(**taken["rates"]))
        for taken in case["rounds"]
        for lengths in floor_lengths(case)
    ]
    return {phase: statistics.median(each[phase] for each in found) for phase in PHASES}


def notes(case: Case) -> str:
    """Of the floor, the lengths, the load and the versions."""
    job, first = Job(**case["job"]), case["rounds"][0]
    operations = statistics.median(flops(job, lengths) for lengths in floor_lengths(case))
    rates = [taken["rates"]["best"] / 1e9 for taken in case["rounds"]]
    lengths = ", ".join(f"{side} {tokens(case, side) / job.num_responses:.1f}" for side in sides(case))
    versions: Sequence[str] = [
        f"{side}: " + ", ".join(f"{name} {number}" for name, number in first[side]["versions"].items())
        for side in sides(case)
    ]
    loads = ", ".join(f"{taken['load']:.1f}" for taken in case["rounds"])
    return (
        f"{operations / 1e9:.1f} GFLOP of matrices, best rate {min(rates):.0f} to {max(rates):.0f} GFLOP/s. Mean "
        f"response: {lengths}. Load before the rounds: {loads}. " + "; ".join(versions) + "."
    )
