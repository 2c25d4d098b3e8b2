"""Proximo and its peers on the same work, in turn, in one run: seconds, memory, and the arithmetic floor.

    python benchmarks/peers/environments.py --environments runs/peers
    python benchmarks/peers/compare.py --environments runs/peers

Every case is taken `--rounds` times; in each round every side runs once, in a process of its own with the same number
of threads, and the matrix rates are measured between them. Tables show medians over all steps of all rounds; the
first step of a process does not count. Results go to `--results`, case by case, so that a run that was stopped goes on
where it was; `--case` takes some cases alone, `--print` shows what is there.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tables import print_tables
from work import SIZES, Job, make_models

from environments import interpreter

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results" / "peers.json"
SIDES = {
    "proximo": "side_proximo.py",
    "trl-1.12": "side_trl.py",
    "torchtune-0.6": "side_torchtune.py",
    "trl-0.11": "side_trl_classic.py",
}
SEPARATE = ("proximo", "trl-1.12", "torchtune-0.6")
SHARED = ("proximo", "trl-0.11")


def cases(size: str) -> dict[str, tuple[Job, tuple[str, ...]]]:
    """Name -> the work, and the sides that do it."""
    made: dict[str, tuple[Job, tuple[str, ...]]] = {}
    for regime in ("none", "eos"):
        plain = Job(models="", size=size, regime=regime)
        made[f"{size}-{regime}"] = plain, SEPARATE
        made[f"{size}-{regime}-bf16"] = replace(plain, precision="bf16"), SEPARATE
        made[f"{size}-{regime}-trunk"] = replace(plain, shared_trunk=True), SHARED
        groups = replace(plain, num_prompts=8, group=8, prompt_tokens=256)
        made[f"{size}-{regime}-groups"] = groups, SEPARATE
        lora = replace(plain, adapter_rank=16)
        made[f"{size}-{regime}-lora"] = lora, ("proximo", "trl-1.12")
        few = replace(lora, num_prompts=8, minibatch=8, epochs=1, prompt_tokens=128, new_tokens=128)
        made[f"{size}-{regime}-lora-few"] = few, ("proximo", "trl-1.12")
    return made


def run(command: Sequence[str | Path], *, threads: int, log: Path) -> dict[str, Any]:
    """In a process of its own; what it printed last. Raises SystemExit with the end of its output where it fails."""
    paths = [str(HERE), str(HERE.parent), str(HERE.parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
    number = str(threads)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": number,
        "MKL_NUM_THREADS": number,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "HF_HUB_OFFLINE": "1",
    }
    merged = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run([str(part) for part in command], check=False, env=environment, **merged)
    log.write_text(done.stdout)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))} failed; the end of {log}:\n{done.stdout[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def take_case(name: str, job: Job, sides: Sequence[str], *, options: argparse.Namespace) -> dict[str, Any]:
    """All rounds of one case."""
    work = options.environments / "work"
    models = work / f"models-{job.size}-{job.regime}"
    if not (models / "tokenizer" / "tokenizer_config.json").is_file():
        models.mkdir(parents=True, exist_ok=True)
        make_models(models, SIZES[job.size], regime=job.regime)
    job = replace(job, models=str(models.resolve()), threads=options.threads, steps=options.steps)
    file = job.save(work / f"{name}.json")
    found: dict[str, Any] = {"job": {**json.loads(file.read_text()), "models": models.name}, "rounds": []}
    for number in range(options.rounds):
        order = sides[number % len(sides) :] + sides[: number % len(sides)]  # nobody is always first
        rates = run([sys.executable, HERE / "floor.py", file], threads=options.threads, log=work / f"{name}-floor.log")
        taken: dict[str, Any] = {"rates": rates, "load": os.getloadavg()[0]}
        for side in order:
            python = sys.executable if side == "proximo" else interpreter(options.environments, side)
            start = time.perf_counter()
            command = [python, HERE / SIDES[side], file]
            taken[side] = run(command, threads=options.threads, log=work / f"{name}-{side}.log")
            check_lengths(job, taken[side], side=side)
            seconds = time.perf_counter() - start
            print(f"{name} round {number + 1} of {options.rounds}: {side} took {seconds:.0f} s in all", flush=True)
        found["rounds"].append(taken)
    return found


def check_lengths(job: Job, found: Mapping[str, Any], *, side: str) -> None:
    """Raises SystemExit where a side's responses are of other lengths than the job has it: it did other work."""
    wanted = sorted(job.response_lengths())
    for step in found["steps"]:
        if sorted(step["lengths"]) != wanted:
            raise SystemExit(f"{side} wrote responses of {sorted(step['lengths'])} tokens, and the job wants {wanted}")


def has_bf16() -> bool:
    """True where the CPU multiplies bfloat16 itself; others are ten times slower with it than with float32."""
    return "_bf16" in Path("/proc/cpuinfo").read_text()


def git(*arguments: str) -> str:
    """Of this repository."""
    command = ["git", "-C", str(HERE), *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def about(threads: int) -> dict[str, Any]:
    """Where and when and what was measured."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    commit, changed = git("rev-parse", "--short=10", "HEAD"), git("status", "--porcelain", "--", "../../src")
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads,
        "commit": commit + ("-dirty" if changed else ""),
    }


def main() -> None:
    """Measure what is asked for and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=Path, default=Path("runs/peers"), help="as environments.py made them")
    parser.add_argument("--size", action="append", choices=[*SIZES], help="S and M, or this one; may be given again")
    parser.add_argument("--case", action="append", help="only this one, such as S-eos-bf16; may be given again")
    parser.add_argument("--side", action="append", choices=[*SIDES], help="only this one; may be given again")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="steps that count in each process")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true", help="measure cases anew that the results already have")
    parser.add_argument("--print", action="store_true", help="print what the results have, and measure nothing")
    options = parser.parse_args()
    options.environments = options.environments.resolve()
    results = json.loads(options.results.read_text()) if options.results.is_file() else {}
    if not options.print:
        measure(results, options)
    print_tables(results)


def measure(results: dict[str, Any], options: argparse.Namespace) -> None:
    """Fill `results`, and save them after every case."""
    (options.environments / "work").mkdir(parents=True, exist_ok=True)
    wanted: Mapping[str, Any] = {
        name: case for size in options.size or ("S", "M") for name, case in cases(size).items()
    }
    for name in options.case or wanted:
        if name not in wanted:
            raise SystemExit(f"there is no case {name}; there are {', '.join(wanted)}")
        job, sides = wanted[name]
        chosen = tuple(side for side in sides if not options.side or side in options.side)
        if (name in results and not options.again) or not chosen:
            continue
        if job.precision == "bf16" and not options.case and not has_bf16():
            print(f"{name}: left out, this CPU has no instructions for bfloat16; --case {name} takes it all the same")
            continue
        results[name] = {"about": about(options.threads), **take_case(name, job, chosen, options=options)}
        options.results.parent.mkdir(parents=True, exist_ok=True)
        options.results.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
