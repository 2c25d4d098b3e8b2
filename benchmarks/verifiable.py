"""Learning from verifiers: countdown and small programs, PPO and a group-normalised run, over seeds.

    python benchmarks/verifiable.py --folder runs/verifiable --seeds 3

For each seed one model is fine-tuned on the spot, and both runs start from it; programs are judged in the sandbox. Each
run is a process with one thread; a finished run is not repeated, one that was cut off goes on. Prints the table of
benchmarks/README.md, keeps the curves in results/verifiable.json and draws docs/verifiable.svg.
"""

import argparse
import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

TASKS = {"countdown": "countdown, held-out problems", "programs": "small programs, held-out problems"}
RUNS = {"PPO": "", "group-normalised": "-groups"}
"""Name -> what the recipe's name has behind that of the task."""
RESULTS = Path(__file__).parent / "results" / "verifiable.json"
PICTURE = Path(__file__).parent.parent / "docs" / "verifiable.svg"


def main() -> None:
    """Run what is missing; print, keep and draw what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/verifiable"), help="where the runs go")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds")
    parser.add_argument("--processes", type=int, default=1, help="seeds at once, one thread each")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), help="which tasks")
    options = parser.parse_args()
    folder = options.folder.resolve()
    wanted = [(task, seed) for task in options.tasks for seed in range(options.seeds)]
    with ThreadPoolExecutor(options.processes) as pool:
        list(pool.map(lambda each: run_seed(folder, *each), wanted))
    found = {
        task: {name: [curve(folder, task, name, seed) for seed in range(options.seeds)] for name in RUNS}
        for task in options.tasks
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print_table(found)
    draw(found, PICTURE)


def run_seed(folder: Path, task: str, seed: int) -> None:
    """The whole recipe, then the group-normalised run from the same fine-tuned model."""
    first = folder / f"{task}-{seed}"
    proximo("pipeline", task, f"run.folder={first}", f"run.seed={seed}")
    from_it = f"ppo.model.path={fine_tuned(first)}"
    proximo("pipeline", f"{task}-groups", f"run.folder={first}-groups", f"run.seed={seed}", "sft=null", from_it)


def proximo(*arguments: str) -> None:
    """One run."""
    command = [sys.executable, "-m", "proximo", *arguments, "--resume=auto", "--quiet"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def fine_tuned(folder: Path) -> Path:
    """The model of the first stage, as the pipeline itself takes it."""
    checkpoints = folder / "sft" / "checkpoints"
    pointer = checkpoints / "best" if (checkpoints / "best").exists() else checkpoints / "latest"
    return checkpoints / pointer.read_text().strip() / "policy"


def curve(folder: Path, task: str, name: str, seed: int) -> dict[str, Any]:
    """Held-out accuracy by step, and what a step costs."""
    run = folder / f"{task}-{seed}{RUNS[name]}" / "ppo"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seen = [line for line in lines if "evaluation/score" in line]
    return {
        "seed": seed,
        "step": [line["step"] for line in seen],
        "accuracy": [line["evaluation/score"] for line in seen],
        "kl": [line["evaluation/kl"] for line in seen],
        "step_seconds": statistics.median(line["time/step_seconds"] for line in lines[1:]),
        "score_seconds": statistics.median(line["time/score_seconds"] for line in lines[1:]),
    }


def print_table(found: dict[str, dict[str, list[dict[str, Any]]]]) -> None:
    """A row per task, run and seed, with the mean below."""
    print("| task | run | seed | after SFT | at the end | best | steps | s/step | of which judging |")
    print("|---|---|---|---|---|---|---|---|---|")
    for task, runs in found.items():
        for name, curves in runs.items():
            for each in curves:
                accuracy = each["accuracy"]
                print(
                    f"| {task} | {name} | {each['seed']} | {accuracy[0]:.3f} | {accuracy[-1]:.3f} | "
                    f"{max(accuracy):.3f} | {each['step'][-1]} | {each['step_seconds']:.2f} | "
                    f"{each['score_seconds']:.2f} |"
                )
            before, after = (statistics.mean(each["accuracy"][place] for each in curves) for place in (0, -1))
            print(f"| {task} | {name} | mean | {before:.3f} | {after:.3f} | | | | |")


def draw(found: dict[str, dict[str, list[dict[str, Any]]]], path: Path) -> None:
    """A panel per task: a thin line for each seed, a thick one for the mean."""
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "verifiable", "font.size": 9}):
        figure = Figure(figsize=(4.5 * len(found), 3), layout="constrained")
        axes = figure.subplots(1, len(found), squeeze=False)[0]
        for axis, (task, runs) in zip(axes, found.items(), strict=True):
            for number, (name, curves) in enumerate(runs.items()):
                steps, colour = curves[0]["step"], f"C{number}"
                for each in curves:
                    axis.plot(steps, each["accuracy"], color=colour, linewidth=0.7, alpha=0.5)
                means = [statistics.mean(values) for values in zip(*(c["accuracy"] for c in curves), strict=True)]
                axis.plot(steps, means, color=colour, marker="o", markersize=3, label=name)
            axis.set(title=TASKS[task], xlabel="step", ylabel="share of right answers", ylim=(0, 1))
            axis.spines[["top", "right"]].set_visible(False)
        axes[0].legend(frameon=False)
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
