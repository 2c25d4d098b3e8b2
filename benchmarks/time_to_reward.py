"""Seconds until a fixed score, Proximo beside TRL 1.12 from the same models and prompts, on two tasks.

    python benchmarks/peers/environments.py --environments runs/peers --peer trl-1.12
    python benchmarks/time_to_reward.py --environments runs/peers --folder runs/time-to-reward

`reviews`: the embedded example, its SFT policy and reward model made once by its recipe (or taken from a finished run
of it, `--demo`). `digits`: six digits to be put in order (`sorting.py`), judged by a rule. Both sides start from the
same weights, take the same prompts and KL coefficient, start the critic alike, and stop where the mean score of three
steps in a row, of samples at temperature 1, is at the target. Both try the same settings, and the best one of each side
counts: the one with the lowest median where it always arrived. Beside them Proximo runs PPO with a shared trunk and
REINFORCE++, which TRL's trainer has not, on the same settings. Each run is a process of its own, and models are loaded
before the time begins. Results go to `--results`, run by run, so that what was stopped goes on where it was; `--print`
shows what is there.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "peers"))

from compare import about
from compare import run as run_side
from race import Race, Settings, arrival
from sorting import problems

from algorithms import model_of, sorting_sft
from algorithms import run as run_recipe
from environments import interpreter

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "time_to_reward.json"
SIDES = {"proximo": "race_proximo.py", "trl-1.12": "race_trl.py"}
"""Compared with each other: PPO with a value model."""
OTHERS = {"proximo, shared trunk": "trunk", "proximo, REINFORCE++": "reinforce++"}
"""What only Proximo has, to be seen beside them; not in the comparison."""


@dataclass(frozen=True)
class Task:
    """What is raced for."""

    target: float
    new_tokens: int
    kl_coefficient: float
    max_steps: int
    settings: tuple[Settings, ...]
    """All that each side tries, the same for both."""


TASKS = {
    "reviews": Task(
        target=1.6,
        new_tokens=80,
        kl_coefficient=0.08,
        max_steps=80,
        settings=(
            Settings(128, 16, 1, 4e-4, 4e-4),
            Settings(128, 16, 1, 8e-4, 8e-4),
            Settings(64, 16, 1, 4e-4, 4e-4),
            Settings(32, 16, 1, 4e-4, 4e-4),
        ),
    ),
    "digits": Task(
        target=0.7,
        new_tokens=16,
        kl_coefficient=0.01,
        max_steps=150,
        settings=(
            Settings(128, 32, 2, 3e-4, 3e-4),
            Settings(128, 32, 2, 6e-4, 6e-4),
            Settings(256, 64, 2, 6e-4, 6e-4),
        ),
    ),
}


def prepare(task: str, folder: Path, demo: Path | None) -> dict[str, Any]:
    """Make the models and prompts of a task where they are not there yet, and say where they are."""
    folder.mkdir(parents=True, exist_ok=True)
    prompts = folder / f"{task}.json"
    if task == "digits":
        run_recipe("sft", sorting_sft(), folder / "digits-sft")
        texts = [row["prompt"] for row in problems(4000, seed=1)]
        policy, reward = model_of(folder / "digits-sft", "policy"), None
    else:
        from proximo.recipes.reviews.review_rows import prompt_rows

        if demo is None:
            demo = folder / "demo"
            command = [sys.executable, "-m", "proximo", "pipeline", "demo", f"run.folder={demo}", "ppo.ppo.num_steps=1"]
            subprocess.run([*command, "--resume=auto", "--quiet"], check=True, stdout=subprocess.DEVNULL)
        texts = [row["prompt"] for row in prompt_rows(4000, seed=2)]
        policy, reward = model_of(demo / "sft", "policy"), str(model_of(demo / "reward", "reward").resolve())
    prompts.write_text(json.dumps(texts))
    return {"policy": str(policy.resolve()), "reward": reward, "prompts": str(prompts.resolve())}


def key(task: str, side: str, settings: Settings, seed: int) -> str:
    """Of a run in the results."""
    return f"{task} | {side} | {settings} | seed {seed}"


def measure(results: dict[str, Any], options: argparse.Namespace) -> None:
    """All runs that are missing, the sides in turn; saved after each."""
    for name in options.task or TASKS:
        task = TASKS[name]
        start = prepare(name, options.folder, options.demo)
        for seed in range(options.seeds):
            for side, settings in ((peer, each) for peer in (*SIDES, *OTHERS) for each in task.settings):
                wanted = key(name, side, settings, seed)
                if wanted in results or (options.side and side not in options.side):
                    continue
                race = Race(
                    **start,
                    settings=settings,
                    new_tokens=task.new_tokens,
                    kl_coefficient=task.kl_coefficient,
                    target=task.target,
                    max_steps=options.max_steps or task.max_steps,
                    seed=seed,
                    threads=options.threads,
                    algorithm=OTHERS.get(side, "ppo"),
                )
                file = race.save(options.folder / "race.json")
                python = interpreter(options.environments, side) if side == "trl-1.12" else sys.executable
                log = options.folder / f"{name}-{side}.log"
                script = HERE / "peers" / SIDES.get(side, SIDES["proximo"])
                found = run_side([python, script, file], threads=options.threads, log=log)
                described = {"task": name, "side": side, "settings": asdict(settings), "seed": seed}
                results[wanted] = {"about": about(options.threads), **described, "target": task.target, **found}
                options.results.write_text(json.dumps(results, indent=1) + "\n")
                last = found["steps"][-1]
                print(f"{wanted}: {len(found['steps'])} steps, {last['seconds']:.0f} s", flush=True)


def print_table(results: Mapping[str, Mapping[str, Any]]) -> None:
    """A row for each task, side and settings; `times` is the median of seconds in those of Proximo's best settings.

    Seconds of the processor stand beside: on a busy machine they are the ones to compare.
    """
    columns = ("task, target", "side", "batch by minibatch, epochs, lr", "there", "steps", "KL", "s: median (range)")
    print("| " + " | ".join((*columns, "CPU s", "times")) + " |")
    print("|---|---|---|---|---|---|---|---|---|")
    grouped: dict[tuple[str, str, Settings], list[Mapping[str, Any]]] = {}
    for found in results.values():
        grouped.setdefault((found["task"], found["side"], Settings(**found["settings"])), []).append(found)
    for (task, side, settings), runs in grouped.items():
        ours = [median_seconds(each) for (t, s, _), each in grouped.items() if (t, s) == (task, "proximo")]
        best = min((each for each in ours if each is not None), default=None)
        print("| " + " | ".join([f"{task}, {runs[0]['target']:g}", side, str(settings), *_cells(runs, best)]) + " |")


def seconds(run: Mapping[str, Any]) -> float | None:
    """Until the target; None where it was not reached."""
    place = arrival([step["score"] for step in run["steps"]], run["target"])
    return None if place is None else run["steps"][place]["seconds"]


def median_seconds(runs: Sequence[Mapping[str, Any]]) -> float | None:
    """None where one of the runs did not arrive."""
    taken = [found for run in runs if (found := seconds(run)) is not None]
    return statistics.median(taken) if len(taken) == len(runs) else None


def _cells(runs: list[Mapping[str, Any]], best: float | None) -> list[str]:
    taken = [found for run in runs if (found := seconds(run)) is not None]
    there = f"{len(taken)} of {len(runs)}"
    median = median_seconds(runs)
    if median is None:
        return [there, "", "", "", "", ""]
    steps = statistics.median(len(run["steps"]) for run in runs)
    cpu, kl = (statistics.median(run["steps"][-1][name] for run in runs) for name in ("cpu_seconds", "kl"))
    times = "" if best is None else f"{median / best:.2f}"
    spread = f"{median:.0f} ({min(taken):.0f} to {max(taken):.0f})"
    return [there, f"{steps:g}", f"{kl:.2f}", spread, f"{cpu:.0f}", times]


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=Path, default=Path("runs/peers"), help="as environments.py made them")
    parser.add_argument("--folder", type=Path, default=Path("runs/time-to-reward"), help="where models go")
    parser.add_argument("--demo", type=Path, help="a run of the demo to take the models of the reviews from")
    parser.add_argument("--task", action="append", choices=[*TASKS], help="only this one; may be given again")
    parser.add_argument("--side", action="append", choices=[*SIDES, *OTHERS], help="only this one; may be given again")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--max-steps", type=int, help="give up sooner")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--print", action="store_true", help="print what the results have, and run nothing")
    options = parser.parse_args()
    options.folder, options.environments = options.folder.resolve(), options.environments.resolve()
    results = json.loads(options.results.read_text()) if options.results.is_file() else {}
    if not options.print:
        measure(results, options)
    print_table(results)


if __name__ == "__main__":
    main()
