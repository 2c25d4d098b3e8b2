"""Learning curves of PPO and its relatives on two tasks: the embedded example, and digits to be put in order.

    python benchmarks/algorithms.py --folder runs/algorithms --demo runs/demo --processes 2

`--demo` is a finished run of the demo, whose fine-tuned model and reward model all runs of that task start from. Each
run is a process with one thread; a finished run is not repeated, one that was cut off goes on. Prints the table of
benchmarks/README.md, keeps the curves in results/algorithms.json and draws docs/algorithms.svg.
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
import yaml
from matplotlib.figure import Figure

HERE = Path(__file__).parent
GROUPS = 8
"""Responses per prompt of the algorithms that compare them."""
CRITIC = {"value_optimizer": {"learning_rate": 5e-4}}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "PPO": {"ppo": {"advantage": "gae", **CRITIC}},
    "PPO, shared trunk": {"ppo": {"advantage": "gae"}, "value": {"init_from": "trunk"}},
    "GRPO": {"ppo": {"advantage": "group_standardised", "policy_loss": {"aggregation": "response_mean"}}},
    "Dr. GRPO": {"ppo": {"advantage": "group_centred", "policy_loss": {"aggregation": "constant"}}},
    "RLOO": {"ppo": {"advantage": "leave_one_out"}},
    "REINFORCE++": {"ppo": {"advantage": "return_to_go"}},
    "GSPO": {
        "ppo": {
            "advantage": "group_standardised",
            "policy_loss": {
                "objective": {"kind": "gspo", "clip_low": 0.05, "clip_high": 0.05},
                "aggregation": "response_mean",
            },
        }
    },
    "decoupled PPO, bf16": {
        "ppo": {"advantage": "gae", "policy_loss": {"behaviour_weight": "truncated"}, **CRITIC},
        "run": {"precision": "bf16"},
    },
}
TASKS = {"digits in order": "evaluation/score", "reviews": "evaluation/gold"}
"""Task -> what is drawn."""
RESPONSES = {"digits in order": 128, "reviews": 128}


def main() -> None:
    """Run what is missing; print, keep and draw what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/algorithms"), help="where the runs go")
    parser.add_argument("--demo", type=Path, default=Path("runs/demo"), help="a finished run of the demo")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds")
    parser.add_argument("--processes", type=int, default=2, help="runs at once, one thread each")
    options = parser.parse_args()
    folder, demo = options.folder.resolve(), options.demo.resolve()
    run("sft", sorting_sft(), folder / "digits in order" / "sft")
    wanted = [(task, name, seed) for task in TASKS for name in ALGORITHMS for seed in range(options.seeds)]
    with ThreadPoolExecutor(options.processes) as pool:
        list(pool.map(lambda each: run("ppo", ppo(folder, demo, *each), run_folder(folder, *each)), wanted))
    found = {
        task: {
            name: [curve(run_folder(folder, task, name, seed), task) for seed in range(options.seeds)]
            for name in ALGORITHMS
        }
        for task in TASKS
    }
    (HERE / "results" / "algorithms.json").write_text(json.dumps(found, indent=1) + "\n")
    print_table(found)
    draw(found, HERE.parent / "docs" / "algorithms.svg")


def sorting_sft() -> dict[str, Any]:
    """A small model that knows the form of the answers and is often wrong."""
    model = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 172,
        "initializer_range": 0.06,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    source = {"function": "sorting:examples", "kwargs": {"num_rows": 8000}}
    return {
        "tokenizer": {"train_vocab_size": 300},
        "model": {"config": model},
        "data": {"sources": [source], "held_out_rows": 100, "max_tokens": 64},
        "sft": {
            "examples_per_step": 32,
            "optimizer": {"learning_rate": 3e-3, "schedule": "cosine", "warmup_updates": 10},
        },
    }


def ppo(folder: Path, demo: Path, task: str, name: str, seed: int) -> dict[str, Any]:
    """The recipe of one run."""
    recipe = reviews_ppo(demo) if task == "reviews" else sorting_ppo(folder)
    for section, changes in ALGORITHMS[name].items():
        recipe[section] = {**recipe.get(section, {}), **changes}
    grouped = recipe["ppo"]["advantage"] not in ("gae", "return_to_go")
    each = GROUPS if grouped else 1
    recipe["ppo"] |= {"prompts_per_step": RESPONSES[task] // each, "responses_per_prompt": each}
    recipe["run"] = {**recipe.get("run", {}), "seed": seed}
    return recipe


def sorting_ppo(folder: Path) -> dict[str, Any]:
    """Exact scores of 0 or 1; nothing to over-optimise, so no KL."""
    train = {"function": "sorting:problems", "kwargs": {"num_rows": 4000, "seed": 1}}
    held_out = {"function": "sorting:problems", "kwargs": {"num_rows": 256, "seed": 2}}
    return {
        "model": {"path": str(model_of(folder / "digits in order" / "sft", "policy"))},
        "data": {"sources": [train], "evaluation_sources": [held_out], "max_prompt_tokens": 32},
        "reward": [{"kind": "function", "function": "sorting:in_order"}],
        "run": {"evaluate_every_steps": 8},
        "ppo": {
            "num_steps": 48,
            "rollout": {"max_new_tokens": 16},
            "kl": "none",
            "policy_optimizer": {"learning_rate": 3e-4},
        },
    }


def reviews_ppo(demo: Path) -> dict[str, Any]:
    """The PPO stage of the demo, shorter."""
    recipe = json.loads((demo / "ppo" / "config.resolved.json").read_text())
    recipe["model"] = {"path": str(model_of(demo / "sft", "policy"))}
    recipe["reward"] = [{"kind": "model", "path": str(model_of(demo / "reward", "reward"))}]
    recipe["run"] = {"evaluate_every_steps": 4}
    recipe["ppo"] |= {"num_steps": 16}
    del recipe["ppo"]["value_optimizer"]
    return recipe


def run(command: str, recipe: dict[str, Any], folder: Path) -> None:
    """One run, in a process of its own, unless it is finished."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    recipe["run"] = {**recipe.get("run", {}), "folder": str(folder), "num_threads": 1, "device": "cpu"}
    file = folder.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(recipe))
    program = [sys.executable, "-m", "proximo", command, str(file.resolve()), "--resume=auto", "--quiet"]
    subprocess.run(program, check=True, stdout=subprocess.DEVNULL, cwd=HERE)  # the task is found in this folder


def run_folder(folder: Path, task: str, name: str, seed: int) -> Path:
    """Where a run writes."""
    return folder / task / f"{name}, seed {seed}".replace(" ", "-").replace(",", "").replace(".", "").lower()


def model_of(run: Path, role: str) -> Path:
    """The best model of a run."""
    checkpoints = run / "checkpoints"
    pointer = checkpoints / "best" if (checkpoints / "best").exists() else checkpoints / "latest"
    return checkpoints / pointer.read_text().strip() / role


def curve(run: Path, task: str) -> dict[str, Any]:
    """The held-out curve of a run, and the median seconds of a step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seen = [line for line in lines if TASKS[task] in line]
    return {
        "step": [line["step"] for line in seen],
        "value": [line[TASKS[task]] for line in seen],
        "step_seconds": statistics.median(line["time/step_seconds"] for line in lines[1:]),
    }


def print_table(found: dict[str, dict[str, list[dict[str, Any]]]]) -> None:
    """Per algorithm and task: where it began, the mean and range at the end over the seeds, seconds per step."""
    print("| algorithm | " + " | ".join(f"{task}: start, end (range) | s/step" for task in TASKS) + " |")
    print("|---|" + "---|---|" * len(TASKS))
    for name in ALGORITHMS:
        cells = []
        for task in TASKS:
            curves = found[task][name]
            ends = [each["value"][-1] for each in curves]
            start = statistics.mean(each["value"][0] for each in curves)
            seconds = statistics.median(each["step_seconds"] for each in curves)
            cells.append(
                f"{start:.2f}, {statistics.mean(ends):.2f} ({min(ends):.2f} to {max(ends):.2f}) | {seconds:.2f}"
            )
        print(f"| {name} | " + " | ".join(cells) + " |")


def draw(found: dict[str, dict[str, list[dict[str, Any]]]], path: Path) -> None:
    """A panel per task: the mean over the seeds."""
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "algorithms", "font.size": 9}):
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        for axis, (task, metric) in zip(figure.subplots(1, len(TASKS)), TASKS.items(), strict=True):
            for name, curves in found[task].items():
                steps = curves[0]["step"]
                means = [statistics.mean(values) for values in zip(*(each["value"] for each in curves), strict=True)]
                axis.plot(steps, means, marker="o", markersize=3, label=name)
            axis.set(title=f"{task}: held-out {metric.split('/')[1]}", xlabel="step")
            axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
