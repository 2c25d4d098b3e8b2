"""Healthy and sick runs of one small task, and what the report says of each: the figures of docs/healthy-runs.md.

    python benchmarks/healthy_runs.py --folder runs/healthy

The task is that of sorting.py, and its fine-tuned model that of algorithms.py. Each run is the healthy one with one
setting made wrong. Draws docs/healthy-runs/NAME.svg and prints the alarms that each run raised.
"""

import argparse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from algorithms import run, sorting_ppo, sorting_sft
from proximo.metrics.alarms import find_alarms
from proximo.metrics.declared.alarms_ppo import PPO_RULES
from proximo.metrics.run_files import Run, read_run

HEALTHY = "healthy"
ALWAYS = {"score/mean": "score", "kl/sequence": "KL, nats", "policy/entropy": "entropy, nats"}
"""Metric -> title of the panels that every figure has; the fourth is the one that tells."""
SICK: dict[str, tuple[dict[str, Any], str, str]] = {
    "too-large-steps": (
        {"ppo": {"policy_optimizer": {"learning_rate": 2e-2}}},
        "policy/clip_fraction",
        "clip fraction",
    ),
    "too-small-steps": (
        {"ppo": {"policy_optimizer": {"learning_rate": 1e-7}}},
        "policy/approx_kl",
        "movement within a step",
    ),
    "useless-critic": (
        {"ppo": {"value_optimizer": {"learning_rate": 0.3}}},
        "value/explained_variance",
        "explained variance",
    ),
    "cut-answers": ({"ppo": {"rollout": {"max_new_tokens": 6}}}, "response/finished_fraction", "finished answers"),
    "paid-for-length": (
        {
            "reward": [{"kind": "function", "function": "sorting:length"}],
            "ppo": {"rollout": {"max_new_tokens": 40}, "kl": {"coefficient": 0.001}},
        },
        "response/tokens_mean",
        "tokens",
    ),
    "groups-without-a-signal": (
        {
            "reward": [{"kind": "function", "function": "sorting:mostly_written"}],
            "ppo": {"advantage": "group_standardised", "prompts_per_step": 16, "responses_per_prompt": 8},
        },
        "group/equal_fraction",
        "groups of equal scores",
    ),
}
"""Name -> what is wrong, the metric that tells, and its title."""


def main() -> None:
    """Run what is missing; draw, and print the alarms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/healthy"), help="where the runs go")
    parser.add_argument("--processes", type=int, default=2, help="runs at once, one thread each")
    options = parser.parse_args()
    folder = options.folder.resolve()
    run("sft", sorting_sft(), folder / "digits in order" / "sft")
    names = (HEALTHY, *SICK)
    with ThreadPoolExecutor(options.processes) as pool:
        list(pool.map(lambda name: run("ppo", recipe(folder, name), folder / name), names))
    found = {name: read_run(folder / name) for name in names}
    pictures = Path(__file__).parent.parent / "docs" / "healthy-runs"
    pictures.mkdir(exist_ok=True)
    for name, (_, metric, title) in SICK.items():
        draw(found[HEALTHY], found[name], {**ALWAYS, metric: title}, pictures / f"{name}.svg")
    for name, each in found.items():
        print(f"{name}: {'; '.join(alarm.title for alarm in find_alarms(each, PPO_RULES)) or 'no alarm'}")


def recipe(folder: Path, name: str) -> dict[str, Any]:
    """The healthy recipe, or that with what is wrong."""
    whole = sorting_ppo(folder)
    whole["ppo"] |= {
        "num_steps": 30,
        "prompts_per_step": 128,
        "kl": {"coefficient": 0.02},
        "value_optimizer": {"learning_rate": 5e-4},
    }
    if name != HEALTHY:
        changes = SICK[name][0]
        whole |= {"reward": changes.get("reward", whole["reward"])}
        for key, value in changes.get("ppo", {}).items():
            whole["ppo"][key] = {**whole["ppo"].get(key, {}), **value} if isinstance(value, dict) else value
    return whole


def draw(healthy: Run, sick: Run, panels: dict[str, str], path: Path) -> None:
    """One panel per metric, the healthy run in grey behind the sick one."""
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.stem, "font.size": 9}):
        figure = Figure(figsize=(9, 2.4), layout="constrained")
        for axis, (metric, title) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
            for each, colour, label in (
                (healthy, "#999999", "healthy"),
                (sick, "#c0392b", path.stem.replace("-", " ")),
            ):
                series = each.series(metric)
                if series.values:
                    axis.plot(series.steps, series.values, color=colour, label=label)
            axis.set(title=title, xlabel="step")
            axis.spines[["top", "right"]].set_visible(False)
            if metric == "score/mean":
                axis.legend(frameon=False, fontsize=8)
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
