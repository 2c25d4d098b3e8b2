"""Draws the curves of the sentiment runs: `python examples/real/curves.py results/sentiment.json sentiment.svg`."""

import json
import sys
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

PANELS = {"score of the reward model": "score", "KL of a response, nats": "kl"}


def main(results: str, picture: str) -> None:
    """One line for each run, in a panel for each measure."""
    runs = [run for run in json.loads(Path(results).read_text(encoding="utf-8"))["written"] if "curve" in run]
    mpl.rcParams |= {"svg.hashsalt": "sentiment", "svg.fonttype": "none", "font.size": 9}
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    for axes, (title, measure) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        for run in runs:
            axes.plot([row["step"] for row in run["curve"]], [row[measure] for row in run["curve"]], label=run["run"])
        axes.set_title(title)
        axes.set_xlabel("step")
    axes.legend(frameon=False)
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    main(*sys.argv[1:])
