"""Writes what runs with checked answers did: `python examples/real/checked.py runs/sums-groups-0 --out results`.

Held-out shares with their intervals before and after, the curve, ten samples, seconds, memory, and the loss on stories,
which have nothing to do with the task.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from sentiment import SHOWN, Row, interval, rows_of, story_loss

STORIES = 10


def shares(rows: Sequence[Row]) -> dict[str, Row]:
    """Share of ones, number and interval of each component that is 0 or 1: of each rule, or of right sums."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name, value in row["components"].items():
            if name.endswith(".kept") or name in ("maths", "countdown"):
                found[name.removesuffix(".kept")].append(value)
    return {
        name: {
            "share": round(sum(ones) / len(ones), 3),
            "of": len(ones),
            "interval": interval(sum(ones) / len(ones), len(ones)),
        }
        for name, ones in found.items()
    }


def of_run(run: Path, *, stories: Sequence[Row], loss_before: float) -> Row:
    """All figures of a run."""
    written = [row for row in rows_of(run / "samples.jsonl") if row["kind"] == "evaluation"]
    metrics = rows_of(run / "metrics.jsonl")
    first, last = ([row for row in written if row["step"] == step] for step in (0, metrics[-1]["step"]))
    steps = [row for row in metrics if "score/mean" in row]
    environment = json.loads((run / "environment.json").read_text(encoding="utf-8"))
    checkpoints = run / "checkpoints"
    policy = checkpoints / (checkpoints / "latest").read_text(encoding="utf-8").strip() / "policy"
    return {
        "run": run.name,
        "before": shares(first),
        "after": shares(last),
        "curve": [round(row["score/mean"], 3) for row in steps],
        "tokens": [round(row["response/tokens_mean"], 1) for row in steps],
        "entropy": [round(row["policy/entropy"], 2) for row in steps if "policy/entropy" in row],
        "explained_variance": [
            round(row["value/explained_variance"], 2) for row in steps if "value/explained_variance" in row
        ],
        "step_seconds": [round(row["time/step_seconds"]) for row in steps],
        "evaluation_seconds": [
            round(row["time/evaluate_seconds"]) for row in metrics if "time/evaluate_seconds" in row
        ],
        "peak_mib": round(max(row["memory/peak_mib"] for row in steps)),
        "processor": environment["processor"],
        "torch": environment["torch"],
        "story_loss": {
            "before": round(loss_before, 3),
            "after": round(story_loss(str(policy), stories), 3),
        },
        "samples": [
            {"id": one["prompt_id"], "prompt": one["prompt"], "before": one["response"], "after": other["response"]}
            for one, other in list(zip(first, last, strict=True))[:SHOWN]
        ],
    }


def main() -> None:
    """Write one file for each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--base", default="models/smollm2")
    parser.add_argument("--stories", type=Path, default=Path("data/lm_corpus/stories.jsonl"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    stories = rows_of(given.stories)[:STORIES]
    loss_before = story_loss(given.base, stories)
    for run in given.runs:
        found = of_run(run, stories=stories, loss_before=loss_before)
        (given.out / f"{run.name}.json").write_text(
            json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        print({key: value for key, value in found.items() if key != "samples"})


if __name__ == "__main__":
    main()
