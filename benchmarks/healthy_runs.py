"""Healthy and sick runs of small tasks, and what the report says of each: figures and table of healthy-runs.md.

    python benchmarks/healthy_runs.py --folder runs/healthy

What the runs are stands in healthy_cases.py and healthy_supervised.py. Makes the models that they start from, runs what
is missing, prints the table, draws docs/healthy-runs/NAME.svg, and keeps what the rules read of each run in
tests/metrics/recorded_runs.jsonl, so that a rule which changes is tried on all of them at once.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import matplotlib as mpl
from healthy_cases import CASES, HEALTHY, recipe
from healthy_supervised import sums_sft
from matplotlib.figure import Figure
from tokenizers import Tokenizer

from algorithms import model_of, run, sorting_sft
from proximo.metrics.report.views import run_alarms
from proximo.metrics.run_files import Run, read_run

HERE = Path(__file__).parent
PICTURES = HERE.parent / "docs" / "healthy-runs"
RECORDED = HERE.parent / "tests" / "metrics" / "recorded_runs.jsonl"
ALWAYS = {"score/mean": "score", "kl/sequence": "KL, nats", "policy/entropy": "entropy, nats"}
"""Metric -> title of the panels that every figure has; the fourth is the one that tells."""
DRAWN = {
    "too-large-steps": ("policy/clip_fraction", "clip fraction"),
    "too-small-steps": ("policy/approx_kl", "movement within a step"),
    "useless-critic": ("value/explained_variance", "explained variance"),
    "cut-answers": ("response/finished_fraction", "finished answers"),
    "paid-for-length": ("response/tokens_mean", "tokens"),
    "paid-for-shortness": ("score/length_correlation", "score with length"),
    "too-much-kl": ("reward/mean", "score minus penalty"),
    "no-kl": ("gold/mean", "gold score"),
    "reinforces-anything": ("response/distinct_2", "different pairs of tokens"),
    "too-cold": ("group/zero_variance_fraction", "groups of equal scores"),
}
"""Sick run -> the metric that tells, and its title."""
READ = (
    *("score/mean", "score/std", "score/best_fraction", "score/length_correlation", "gold/mean"),
    *("kl/sequence", "kl/k3_per_token", "kl/coefficient", "advantage/std", "value/explained_variance", "value/loss"),
    *("response/tokens_mean", "response/finished_fraction", "response/distinct_2", "response/repeat_4gram"),
    *("group/zero_variance_fraction", "policy/clip_fraction", "policy/approx_kl", "policy/entropy"),
    *("policy/rejected_fraction", "policy/behaviour_clip_fraction"),
    *("evaluation/score", "evaluation/gold", "evaluation/loss", "evaluation/pairs", "evaluation/pair_accuracy"),
    *("evaluation/calibration_error", "evaluation/logprob_chosen", "sft/loss"),
    *("reward_model/loss", "reward_model/pair_accuracy", "reward_model/pairs"),
    *("prm/loss", "evaluation/constant_loss", "evaluation/steps"),
    *("dpo/loss", "dpo/accuracy", "dpo/pairs"),
    *("kto/loss", "kto/auc", "kto/examples", "kto/desirable_fraction"),
    *("evaluation/examples", "evaluation/auc", "evaluation/logprob_desirable"),
)
"""The metrics that rules read."""
COUNTED = (
    "response/unscored",
    "policy/skipped_updates",
    "first_minibatch/limit_exceeded",
    "progress/non_finite_metrics",
)
"""Those of which a run without any needs none."""
SETTINGS = (
    *("num_steps", "epochs_per_step", "solved_score", "kl", "policy_optimizer", "rollout", "policy_loss", "advantage"),
    *("num_epochs", "optimizer", "desirable_weight", "undesirable_weight"),
)
"""The settings of a trainer that they read, or the sections that hold them."""


def main() -> None:
    """Run what is missing; draw, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/healthy"), help="where the runs go")
    parser.add_argument("--processes", type=int, default=2, help="runs at once, one thread each")
    options = parser.parse_args()
    folder = options.folder.resolve()
    prepare(folder)
    with ThreadPoolExecutor(options.processes) as pool:
        list(pool.map(lambda name: run(CASES[name].trainer, recipe(folder, name), folder / name), CASES))
    found = {name: read_run(folder / name) for name in CASES}
    PICTURES.mkdir(exist_ok=True)
    for name, (metric, title) in DRAWN.items():
        healthy = found[CASES[name].task.partition("-")[0]]
        draw(healthy, found[name], {**ALWAYS, metric: title}, PICTURES / f"{name}.svg")
    RECORDED.write_text("".join(json.dumps(record(name, each)) + "\n" for name, each in found.items()))
    print_table(found)


def prepare(folder: Path) -> None:
    """Make the models that the runs start from, and one whose tokenizer has the wrong end of sequence."""
    run("sft", sorting_sft(), folder / "digits in order" / "sft")
    run("sft", sums_sft(), folder / "sums" / "sft")
    for name in ("demo", "countdown"):
        place = f"run.folder={folder / 'models' / name}"
        program = [sys.executable, "-m", "proximo", "pipeline", name, place, "ppo.ppo.num_steps=2", "--resume=auto"]
        subprocess.run([*program, "--quiet"], check=True, stdout=subprocess.DEVNULL)
    wrong = folder / "models" / "wrong end"
    if not wrong.exists():
        shutil.copytree(model_of(folder / "models" / "countdown" / "sft", "policy"), wrong)
        settings = json.loads((wrong / "tokenizer_config.json").read_text())
        (wrong / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "~"}))
        end = Tokenizer.from_file(str(wrong / "tokenizer.json")).token_to_id("~")
        for name in ("config.json", "generation_config.json"):
            settings = json.loads((wrong / name).read_text())
            (wrong / name).write_text(json.dumps(settings | {"eos_token_id": end}))


def record(name: str, each: Run) -> dict[str, Any]:
    """What the rules read, with three digits; losses with five, since a rule asks whether they move at all."""
    columns = {
        metric: [rounded(metric, line.get(metric)) for line in each.lines]
        for metric in (*READ, *COUNTED)
        if (any(each.series(metric).values) if metric in COUNTED else len(each.series(metric)))
    }
    case = CASES[name]
    section = (each.config or {}).get(case.trainer, {})
    return {
        "name": name,
        "trainer": case.trainer,
        "alarm": case.alarm,
        "total_steps": each.total_steps,
        "config": {case.trainer: {key: section[key] for key in SETTINGS if key in section}},
        "step": [int(line["step"]) for line in each.lines],
        "metrics": columns,
    }


def rounded(metric: str, value: float | None) -> float | None:
    """None where the step has none."""
    return (
        None if value is None else float(f"{value:{'.5g' if metric.endswith(('/loss', '/constant_loss')) else '.3g'}}")
    )


def print_table(found: dict[str, Run]) -> None:
    """A row for each first alarm, with the runs that raised it."""
    raised: dict[str, list[str]] = defaultdict(list)
    for name, each in found.items():
        for alarm in run_alarms(each)[:1]:
            raised[alarm.title].append(f"`{name}`")
    print("| first alarm | failing runs |\n|---|---|")
    for title, names in raised.items():
        print(f"| *{title}* | {', '.join(names)} |")
    judged = [
        f"{name} ({CASES[name].wrong or 'nothing is wrong'})"
        for name, each in found.items()
        if [alarm.title for alarm in run_alarms(each)][:1] != expected(name)
    ]
    print(
        f"{len(HEALTHY)} healthy, {len(CASES) - len(HEALTHY)} sick; judged otherwise than expected: {judged or 'none'}"
    )


def expected(name: str) -> list[str]:
    """The alarm that has to come first; none for a healthy run."""
    alarm = CASES[name].alarm
    return [] if alarm is None else [alarm]


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
