"""How often answers of a model beat those of another, by a judge's scores: `wins.py base.jsonl other.jsonl ...`

These are files of `proximo generate --chat --reward JUDGE --output FILE`, for the same prompts. Of each prompt every
answer meets every answer of the base; a tie counts half. The interval (95%) is a bootstrap over prompts.
"""

import json
import random
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean

RESAMPLES = 2000


def main(base: str, *others: str) -> None:
    """Print a line for each of the others."""
    for other in others:
        shares = win_shares(scores(base), scores(other))
        rng = random.Random(0)
        drawn = sorted(mean(rng.choices(shares, k=len(shares))) for _ in range(RESAMPLES))
        low, high = drawn[RESAMPLES // 40], drawn[-RESAMPLES // 40]
        row = {"file": Path(other).name, "prompts": len(shares), "win_rate": round(mean(shares), 3)}
        print(json.dumps({**row, "interval": [round(low, 3), round(high, 3)]}))


def scores(path: str) -> dict[str, list[float]]:
    """By prompt, the scores of its answers."""
    found = defaultdict(list)
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        found[json.dumps(row["prompt"])].append(row["score"])
    return found


def win_shares(base: dict[str, list[float]], other: dict[str, list[float]]) -> list[float]:
    """Of each prompt, the share of meetings that the other wins."""
    return [
        mean((mine > theirs) + 0.5 * (mine == theirs) for mine in other[prompt] for theirs in base[prompt])
        for prompt in base
    ]


if __name__ == "__main__":
    main(*sys.argv[1:])
