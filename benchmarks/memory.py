"""Peak memory of a PPO step on size M: both regimes, the optimizer in the backward pass, and a vocabulary of 150,000.

    python benchmarks/memory.py                 all cases; goes on where it was stopped
    python benchmarks/memory.py --print         the tables of what results/memory.json has

Each case is a process of its own that takes two steps of the work of `peers/`, with one epoch instead of four: a
second pass over the same batch needs no more. Measured is VmHWM above VmRSS after the imports. The growth with the
vocabulary stands beside what the added embeddings and output layers hold: weights of four models, gradients and two
moments of the two that train.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "peers"))

from scaling import MIB, parameters, state_bytes
from stopwatch import Stopwatch
from work import SIZES, Job, make_models

RESULTS = Path(__file__).parent / "results" / "memory.json"
SLACK_BYTES = 300_000_000
"""What the peak may grow by beside what the formula says."""


@dataclass(frozen=True)
class Case:
    """One measured process."""

    size: str
    regime: str
    in_backward: bool = False
    given_back: bool = False
    """glibc returns blocks of 1 MiB and more to the system as they are freed, instead of keeping them for later."""
    limit_bytes: float | None = None
    """What the project asks of it."""


CASES = {
    "M-none": Case("M", "none", limit_bytes=2.2e9),
    "M-eos": Case("M", "eos", limit_bytes=2.2e9),
    "M-none, optimizer in backward": Case("M", "none", in_backward=True, limit_bytes=1.9e9),
    "M-eos, optimizer in backward": Case("M", "eos", in_backward=True, limit_bytes=1.9e9),
    "M-none, optimizer in backward, blocks given back": Case(
        "M", "none", in_backward=True, given_back=True, limit_bytes=1.9e9
    ),
    "M-150k-none": Case("M-150k", "none"),
    "M-150k-none, optimizer in backward": Case("M-150k", "none", in_backward=True),
    "tiny": Case("tiny", "eos"),  # a smoke test; no row of any table
}
GROWTH = {"M-none": "M-150k-none", "M-none, optimizer in backward": "M-150k-none, optimizer in backward"}
"""A case, and the same with the larger vocabulary."""


def predicted_growth_bytes(smaller: str, larger: str, *, in_backward: bool) -> int:
    """Of weights, gradients and moments between two sizes; in the backward pass, only one gradient exists at a time.

    That one is a whole matrix: the largest of the vocabulary's, of which `smaller` has a smaller one.
    """
    small, large = SIZES[smaller], SIZES[larger]
    growth = state_bytes(large) - state_bytes(small)
    if not in_backward:
        return growth
    gradients = sum(parameters(large, head=head) - parameters(small, head=head) for head in (True, False))
    return growth - 4 * gradients + 4 * (large.vocabulary - small.vocabulary) * large.width


def measure(case: Case, folder: str, *, threads: int) -> None:
    """In a fresh process: take two steps and print what they needed."""
    import torch
    from side_proximo import config_of, make_trainer

    from proximo.config.ppo.options import PPOConfig

    torch.set_num_threads(threads)
    job = Job(models=folder, size=case.size, regime=case.regime, epochs=1, steps=1, threads=threads)
    config = config_of(job).model_dump(exclude_unset=True)
    if case.in_backward:
        changes = {"in_backward": True, "max_gradient_norm": None, "non_finite_gradient": "stop"}
        config["policy_optimizer"] |= changes
        config["value_optimizer"] |= changes
        config["guards"] = {"max_ratio": None, "max_kl": None, "target_kl": None}
    watch = Stopwatch()
    trainer, prompts = make_trainer(job, config=PPOConfig.model_validate(config))
    for _ in range(2):
        outcome = trainer.run_step(prompts=prompts)
        watch.add(outcome.seconds, [len(scored.response.token_ids) for scored in outcome.experience.scored])
    watch.report("torch", "transformers")


def taken(name: str, case: Case, *, threads: int) -> dict[str, Any]:
    """Make the models, and measure them in a process of their own."""
    with tempfile.TemporaryDirectory() as folder:
        make_models(Path(folder), SIZES[case.size], regime=case.regime)
        command = [sys.executable, __file__, "--measure", name, folder, "--threads", str(threads)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        if case.given_back:
            environment["MALLOC_MMAP_THRESHOLD_"] = str(MIB)  # by itself it rises to 32 MiB as blocks are freed
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    found = json.loads(done.stdout.splitlines()[-1])
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "threads": threads,
        "peak_mib": found["peak_mib"],
        "state_mib": state_bytes(SIZES[case.size]) / MIB,
        "versions": found["versions"],
    }


def print_tables(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Peaks, then the growth with the vocabulary."""
    print("| case | weights, gradients, moments, MB | peak, MB | asked for, MB |\n|---|---|---|---|")
    for name, found in results.items():
        limit = CASES[name].limit_bytes
        asked = "" if limit is None else f"{limit / 1e6:.0f}"
        print(f"| {name} | {_mb(found['state_mib'])} | {_mb(found['peak_mib'])} | {asked} |")
    allowed = f"{SLACK_BYTES / 1e6:.0f}"
    print(f"\n| from 8,192 to 150,000 tokens | by formula, MB | measured, MB | more by, MB (at most {allowed}) |")
    print("|---|---|---|---|")
    for small, large in GROWTH.items():
        if small in results and large in results:
            first, second = CASES[small], CASES[large]
            formula = predicted_growth_bytes(first.size, second.size, in_backward=second.in_backward)
            grown = (results[large]["peak_mib"] - results[small]["peak_mib"]) * MIB
            print(f"| {small} | {formula / 1e6:.0f} | {grown / 1e6:.0f} | {(grown - formula) / 1e6:.0f} |")


def _mb(mib: float) -> str:
    return f"{mib * MIB / 1e6:.0f}"


def main() -> None:
    """Measure what is missing and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=[*CASES], help="only this one; may be given again")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true", help="measure cases anew that the results already have")
    parser.add_argument("--print", action="store_true", help="print what the results have, and measure nothing")
    parser.add_argument("--measure", nargs=2, metavar=("CASE", "FOLDER"), help="what a case's process is started with")
    options = parser.parse_args()
    if options.measure:
        measure(CASES[options.measure[0]], options.measure[1], threads=options.threads)
        return
    results = json.loads(options.results.read_text()) if options.results.is_file() else {}
    for name in options.case or [name for name in CASES if name != "tiny"]:
        if not options.print and (options.again or name not in results):
            results[name] = taken(name, CASES[name], threads=options.threads)
            options.results.write_text(json.dumps(results, indent=1) + "\n")
    print_tables(results)


if __name__ == "__main__":
    main()
