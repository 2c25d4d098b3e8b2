"""The curves on the pages of SFT, reward models, PPO, DPO and KTO: one run of each on the reviews of the demo, seed 0.

    python benchmarks/page_curves.py FOLDER

FOLDER keeps the runs: the demo, and DPO, IPO and KTO from its fine-tuned model. A run that is finished is not repeated.
Draws docs/pictures/*-curves.svg. About five minutes on two cores, float32.
"""

import json
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
POINTS = 50
BLUE, ORANGE = "#1f6fb2", "#d9730d"
PAIRS = {
    "function": "proximo.recipes.reviews.review_rows:preference_rows",
    "kwargs": {"num_rows": 3600, "noise": 0.15},
}
FROM_PAIRS = [
    *(f"data.sources=[{json.dumps(PAIRS)}]", "data.held_out_rows=400", "data.max_tokens=150"),
    *("run.evaluate_every_steps=20", "run.precision=float32", "run.device=cpu", "run.num_threads=1"),
]
DPO = [*FROM_PAIRS, "dpo.pairs_per_step=16", "dpo.optimizer.learning_rate=1e-4"]
KTO = [*FROM_PAIRS, "kto.examples_per_step=32", "kto.optimizer.learning_rate=1e-4"]
Panel = dict[str, dict[str, str]]
"""Title of a panel -> label of a curve -> metric."""
PANELS: dict[str, Panel] = {
    "sft": {
        "loss, nats per token": {"training": "sft/loss", "held out": "evaluation/loss"},
        "gradient norm": {"training": "sft/gradient_norm"},
    },
    "reward": {
        "loss, nats per pair": {"training": "reward_model/loss", "held out": "evaluation/loss"},
        "pair accuracy": {"training": "reward_model/pair_accuracy", "held out": "evaluation/pair_accuracy"},
    },
    "ppo": {
        "score of the reward model": {"training": "score/mean", "held out": "evaluation/score"},
        "gold score": {"training": "gold/mean", "held out": "evaluation/gold"},
        "KL of a response, nats": {"training": "kl/sequence"},
        "explained variance of the critic": {"training": "value/explained_variance"},
    },
}
OF_KTO: Panel = {
    "AUC": {"training": "kto/auc", "held out": "evaluation/auc"},
    "implicit reward, held out": {
        "desirable": "evaluation/reward_desirable",
        "undesirable": "evaluation/reward_undesirable",
    },
    "log-prob of an answer, held out": {
        "desirable": "evaluation/logprob_desirable",
        "undesirable": "evaluation/logprob_undesirable",
    },
}
COMPARED = {
    "pair accuracy, held out": "evaluation/pair_accuracy",
    "margin, held out": "evaluation/margin_mean",
    "log-prob of the chosen answer": "evaluation/logprob_chosen",
}


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    demo, started = folder / "demo", folder / "models" / "sft"
    if not (demo / "ppo" / "outcome.json").is_file():
        proximo("pipeline", "demo", f"run.folder={demo}", "--resume=auto")
    if not started.exists():
        proximo("export", str(demo / "sft"), str(started))
    for loss in ("sigmoid", "ipo"):
        run = [f"model.path={started}", *DPO, f"dpo.loss={loss}", f"run.folder={folder / f'dpo-{loss}'}"]
        proximo("dpo", "dpo", *run, "--resume=auto")
    proximo("kto", "kto", f"model.path={started}", *KTO, f"run.folder={folder / 'kto'}", "--resume=auto")
    for stage, panels in PANELS.items():
        draw(curves_of(demo / stage, panels), PICTURES / f"{stage}-curves.svg")
    draw(curves_of(folder / "kto", OF_KTO), PICTURES / "kto-curves.svg")
    compared = [
        (title, {name: series(folder / f"dpo-{loss}", metric) for name, loss in (("DPO", "sigmoid"), ("IPO", "ipo"))})
        for title, metric in COMPARED.items()
    ]
    draw(compared, PICTURES / "dpo-curves.svg")


def curves_of(run: Path, panels: Panel) -> list[tuple[str, dict[str, tuple[list[float], list[float]]]]]:
    return [(title, {label: series(run, metric) for label, metric in names.items()}) for title, names in panels.items()]


def proximo(*arguments: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "proximo", *arguments, *(["--quiet"] * (arguments[0] != "export"))], check=True
    )


def series(run: Path, metric: str) -> tuple[list[float], list[float]]:
    """Steps and values of a metric; of a long run, the means of 50 equal parts."""
    lines: list[dict[str, Any]] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [(line["step"], line[metric]) for line in lines if metric in line]
    if not found:
        raise SystemExit(f"{run} has no {metric}")
    size = max(1, len(found) // POINTS)
    parts = [found[start : start + size] for start in range(0, len(found) - size + 1, size)]
    return [mean(step for step, _ in part) for part in parts], [mean(value for _, value in part) for part in parts]


def draw(curves: list[tuple[str, dict[str, tuple[list[float], list[float]]]]], path: Path) -> None:
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.stem, "font.size": 9}):
        figure = Figure(figsize=(2.6 * len(curves), 2.3), layout="constrained")
        for axes, (title, lines) in zip(figure.subplots(1, len(curves)), curves, strict=True):
            for (label, (steps, values)), color in zip(lines.items(), (BLUE, ORANGE), strict=False):
                few = {"marker": "o", "linestyle": "none"} if len(steps) <= 3 else {}
                axes.plot(steps, values, label=label, color=color, linewidth=1.3, **few)
            axes.set_title(title, fontsize=9)
            axes.set_xlabel("step")
            axes.grid(alpha=0.3)
            if len(lines) > 1:
                axes.legend(fontsize=8, frameon=False)
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
