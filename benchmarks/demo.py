"""The embedded example over seeds, and its KL coefficient at ten times, one time and zero. Prints the tables of
benchmarks/README.md, keeps the figures in benchmarks/results/demo.json and draws docs/kl-sweep.svg.

    python benchmarks/demo.py --folder runs/benchmark --seeds 5

Each run is a process of its own; a finished run is not repeated.
"""

import argparse
import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import Any

import matplotlib as mpl
import yaml
from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results" / "demo.json"
MAXIMUM_GOLD = 1.0
SWEEP = {"ten times": 10.0, "once": 1.0, "zero": 0.0}
SWEEP_STEPS = 120
"""Six times those of the example: over-optimisation takes its time."""


def main() -> None:
    """Run what is missing and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmark"), help="where the runs go")
    parser.add_argument("--seeds", type=int, default=5, help="how many seeds")
    parser.add_argument("--processes", type=int, default=1, help="runs at once, each with the recipe's threads")
    parser.add_argument("--no-sweep", action="store_true", help="leave out the KL coefficients")
    options = parser.parse_args()
    with ThreadPoolExecutor(options.processes) as pool:
        list(pool.map(lambda seed: run_seed(options.folder, seed), range(options.seeds)))
        figures = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        figures["seeds"] = [seed_figures(options.folder, seed) for seed in range(options.seeds)]
        if not options.no_sweep:
            list(pool.map(lambda factor: run_sweep(options.folder, factor), SWEEP.values()))
            figures["sweep"] = {name: curves(sweep_folder(options.folder, f)) for name, f in SWEEP.items()}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(figures, indent=1) + "\n")
    print_seeds(figures["seeds"])
    if not options.no_sweep:
        print_sweep(figures["sweep"])
        draw(figures["sweep"], Path(__file__).parent.parent / "docs" / "kl-sweep.svg")


def run_seed(folder: Path, seed: int) -> None:
    """The whole pipeline."""
    proximo("pipeline", "demo", "--resume=auto", f"run.folder={folder / f'seed-{seed}'}", f"run.seed={seed}")


def run_sweep(folder: Path, factor: float) -> None:
    """PPO alone, from the SFT and reward models of seed 0."""
    proximo(
        "pipeline",
        "demo",
        "--resume=auto",
        "sft=null",
        "reward=null",
        f"run.folder={sweep_folder(folder, factor).parent}",
        f"ppo.model.path={model(folder, 'sft', 'policy')}",
        f"ppo.reward.0.path={model(folder, 'reward', 'reward')}",
        f"ppo.ppo.kl.coefficient={recipe_coefficient() * factor:g}",
        f"ppo.ppo.num_steps={SWEEP_STEPS}",
    )


def recipe_coefficient() -> float:
    """The KL coefficient of the example."""
    text = (files("proximo") / "recipes" / "demo.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)["ppo"]["ppo"]["kl"]["coefficient"]


def proximo(*arguments: str) -> None:
    """One run; its lines go to the terminal as they come."""
    command = [sys.executable, "-m", "proximo", *arguments, "--quiet"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def sweep_folder(folder: Path, factor: float) -> Path:
    """The PPO stage of one coefficient."""
    return folder / f"kl-{factor:g}" / "ppo"


def model(folder: Path, stage: str, role: str) -> Path:
    """The stage's best model of seed 0, as the pipeline itself would take it."""
    checkpoints = folder / "seed-0" / stage / "checkpoints"
    pointer = checkpoints / "best" if (checkpoints / "best").exists() else checkpoints / "latest"
    return checkpoints / pointer.read_text().strip() / role


def lines(folder: Path) -> list[dict[str, Any]]:
    """Metrics of a run."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def seed_figures(folder: Path, seed: int) -> dict[str, float]:
    """What came of one seed."""
    run = folder / f"seed-{seed}"
    accuracy = lines(run / "reward")[-1]["evaluation/pair_accuracy"]
    evaluations = [line for line in lines(run / "ppo") if "evaluation/gold" in line]
    before, after = evaluations[0], evaluations[-1]
    gained = (after["evaluation/gold"] - before["evaluation/gold"]) / (MAXIMUM_GOLD - before["evaluation/gold"])
    return {
        "seed": seed,
        "pair_accuracy": accuracy,
        "gold_before": before["evaluation/gold"],
        "gold_after": after["evaluation/gold"],
        "way_to_maximum": gained,
        "kl": after["evaluation/kl"],
        "distinct_2_ratio": after["evaluation/distinct_2"] / before["evaluation/distinct_2"],
    }


def curves(run: Path) -> dict[str, list[float]]:
    """Held-out score, gold and KL by step."""
    evaluations = [line for line in lines(run) if "evaluation/gold" in line]
    names = {"step": "step", "score": "evaluation/score", "gold": "evaluation/gold", "kl": "evaluation/kl"}
    return {name: [line[metric] for line in evaluations] for name, metric in names.items()}


def print_seeds(rows: list[dict[str, float]]) -> None:
    """A Markdown table with the mean below."""
    names = [name for name in rows[0] if name != "seed"]
    print("| seed | " + " | ".join(names) + " |\n|" + "---|" * (len(names) + 1))
    for row in rows:
        print(f"| {row['seed']} | " + " | ".join(f"{row[name]:.3f}" for name in names) + " |")
    means = [statistics.mean(row[name] for row in rows) for name in names]
    print("| mean | " + " | ".join(f"{mean:.3f}" for mean in means) + " |\n")


def print_sweep(sweep: dict[str, dict[str, list[float]]]) -> None:
    """The last evaluation of each coefficient."""
    print("| KL coefficient | score | gold | KL |\n|---|---|---|---|")
    for name, found in sweep.items():
        print(f"| {name} | {found['score'][-1]:.3f} | {found['gold'][-1]:.3f} | {found['kl'][-1]:.2f} |")


def draw(sweep: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Three panels: what the reward model says, what it is worth, how far the policy went."""
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "kl-sweep", "font.size": 9}):
        figure = Figure(figsize=(9, 2.8), layout="constrained")
        for axis, (name, title) in zip(
            figure.subplots(1, 3),
            {"score": "reward model's score", "gold": "gold score (never trained on)", "kl": "KL, nats"}.items(),
            strict=True,
        ):
            for label, found in sweep.items():
                axis.plot(found["step"], found[name], marker="o", markersize=3, label=f"KL coefficient {label}")
            axis.set(title=title, xlabel="step")
            axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
