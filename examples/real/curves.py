"""Draws the curves of docs/results.md from `examples/real/results`: `curves.py sentiment|sums|preferences FILE.svg`."""

import json
import sys
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"
SENTIMENT = {
    **{f"sentiment-ppo-{seed}": f"seed {seed}" for seed in range(4)},
    **{f"free-lines-{seed}": f"several lines, {seed}" for seed in range(2)},
}
"""How the runs of the results are called in the picture."""
Lines = dict[str, tuple[list[float], list[float]]]
"""By label, where a line goes across and up."""


def read(name: str) -> Any:
    """A file of the results."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def sentiment() -> dict[str, Lines]:
    """Score and KL of the runs that have a curve."""
    written = [run for path in sorted(RESULTS.glob("sentiment*.json")) for run in read(path.stem)["written"]]
    found = sorted((run for run in written if run.get("run") in SENTIMENT), key=lambda run: len(run["curve"]))
    longest = {run["run"]: run["curve"] for run in found}
    runs = {label: longest[name] for name, label in SENTIMENT.items()}
    return {"score of the reward model, by step": by_step(runs, "score"), "KL of a response, nats": by_step(runs, "kl")}


def sums() -> dict[str, Lines]:
    """The share of right answers by samples and by seconds of training, TRL beside it."""
    samples, seconds = {}, {}
    for path in sorted(RESULTS.glob("sums-*.json")):
        run = read(path.stem)
        steps = run.get("steps", [])
        scores = [step["score"] for step in steps] or run["curve"]
        times = [step["seconds"] for step in steps] or run["step_seconds"]
        samples[path.stem] = [256.0 * number for number in range(1, len(scores) + 1)], scores
        seconds[path.stem] = [*accumulate(times)], scores
    return {"share right, by samples": samples, "share right, by seconds": seconds}


def preferences() -> dict[str, Lines]:
    """What the two runs that sample write: by the reward model, and how long."""
    runs = {row["policy"]: row["curve"] for row in read("preferences") if row.get("curve")}
    return {
        "score, by step": by_step(runs, "score"),
        "KL of a response, nats": by_step(runs, "kl"),
        "tokens, of at most 48": by_step(runs, "tokens"),
    }


def by_step(runs: dict[str, list[dict[str, float]]], measure: str) -> Lines:
    """A line for each run."""
    return {name: ([row["step"] for row in rows], [row[measure] for row in rows]) for name, rows in runs.items()}


def main(what: str, picture: str) -> None:
    """A panel for each title."""
    panels: Callable[[], dict[str, Lines]] = {"sentiment": sentiment, "sums": sums, "preferences": preferences}[what]
    mpl.rcParams |= {"svg.hashsalt": what, "svg.fonttype": "none", "font.size": 9}
    figure = Figure(figsize=(9, 2.6), layout="constrained")
    drawn = panels()
    for axes, (title, lines) in zip(figure.subplots(1, len(drawn)), drawn.items(), strict=True):
        for label, (across, up) in lines.items():
            axes.plot(across, up, label=label)
        axes.set_title(title)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", frameon=False)
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    main(*sys.argv[1:])
