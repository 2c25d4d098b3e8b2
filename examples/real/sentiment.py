"""Judges what the sentiment runs wrote: `python examples/real/sentiment.py runs/sentiment-ppo --out results.json`.

The judge is naive Bayes on single words and pairs of words, learned from 500 whole reviews (`movie_reviews`) in pieces
of 20 words. It has seen neither the sentences of the reward model (SST-2) nor the held-out reviews, and no model of the
runs is part of it. It reads the continuation alone, without the opening.
"""

import argparse
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
PIECE = 20
SHOWN = 10
"""Samples of the results: the first ten of the held-out openings."""


class Judge:
    """Naive Bayes with add-one smoothing: a text is positive if its words are likelier in positive pieces."""

    def __init__(self, reviews: Sequence[Row]) -> None:
        counts, pieces = (Counter(), Counter()), [0, 0]
        for review in reviews:
            words = review["text"].split()
            for start in range(0, len(words), PIECE):
                pieces[review["label"]] += 1
                counts[review["label"]].update(features(" ".join(words[start : start + PIECE])))
        negative, positive = counts
        self._weights = {
            word: math.log((positive[word] + 1) / (pieces[1] + 2)) - math.log((negative[word] + 1) / (pieces[0] + 2))
            for word in negative | positive
        }

    def positive(self, text: str) -> bool:
        """Whether the words speak for a positive text."""
        return sum(self._weights.get(word, 0.0) for word in features(text)) > 0

    def share(self, texts: Sequence[str]) -> float:
        """The share of positive ones."""
        return sum(map(self.positive, texts)) / len(texts)

    def accuracy(self, rows: Sequence[Row]) -> float:
        """The share of labelled texts that it judges as labelled."""
        return sum(self.positive(row["text"]) == bool(row["label"]) for row in rows) / len(rows)


def features(text: str) -> set[str]:
    """Words and pairs of neighbouring words, in lower case."""
    words = re.findall(r"[a-z]+(?:'[a-z]+)?", text.lower())
    return {*words, *(f"{first} {second}" for first, second in itertools.pairwise(words))}


def interval(share: float, number: int) -> tuple[float, float]:
    """Wilson's, at 95%."""
    z = 1.96
    centre = (share + z * z / (2 * number)) / (1 + z * z / number)
    half = z / (1 + z * z / number) * math.sqrt(share * (1 - share) / number + z * z / (4 * number * number))
    return round(centre - half, 3), round(centre + half, 3)


def distinct_pairs(texts: Iterable[str]) -> float:
    """Different pairs of neighbouring words as a share of all: low where texts repeat themselves."""
    pairs = [pair for text in texts for words in [text.split()] for pair in itertools.pairwise(words)]
    return len(set(pairs)) / max(len(pairs), 1)


def described(judge: Judge, rows: Sequence[Row]) -> Row:
    """The figures of a set of continuations."""
    texts = [row["response"] for row in rows]
    share = judge.share(texts)
    scores = [row["score"] for row in rows if row["score"] is not None]
    return {
        "continuations": len(rows),
        "positive": share,
        "positive_interval": interval(share, len(rows)),
        "score": sum(scores) / len(scores) if scores else None,
        "tokens": sum(row["num_tokens"] for row in rows) / len(rows),
        "distinct_pairs": distinct_pairs(texts),
    }


def of_run(judge: Judge, run: Path) -> Row:
    """Before and after, the curve of the steps, and the first ten openings with both continuations."""
    written = [row for row in rows_of(run / "samples.jsonl") if row["kind"] == "evaluation"]
    metrics = rows_of(run / "metrics.jsonl")
    first, last = ([row for row in written if row["step"] == step] for step in (0, max(row["step"] for row in written)))
    after = {row["prompt_id"]: row for row in last}
    return {
        "run": run.name,
        "seconds": sum(row.get("time/step_seconds", 0) for row in metrics),
        "peak_mib": max(row.get("memory/peak_mib", 0) for row in metrics),
        "kl": metrics[-1]["evaluation/kl"],
        "before": described(judge, first),
        "after": described(judge, last),
        "curve": [
            {
                "step": row["step"],
                "score": round(row["score/mean"], 3),
                "kl": round(row["kl/sequence"], 3),
                "explained_variance": round(row["value/explained_variance"], 3),
            }
            for row in metrics
            if "score/mean" in row
        ],
        "samples": [
            {
                "id": row["prompt_id"],
                "opening": row["prompt"],
                "before": row["response"],
                "after": after[row["prompt_id"]]["response"],
            }
            for row in first[:SHOWN]
        ],
        "judged": {
            row["prompt_id"]: [judge.positive(row["response"]) for row in (row, after[row["prompt_id"]])]
            for row in first
        },
    }


def story_loss(model: str, stories: Sequence[Row]) -> float:
    """Mean nats per token of text that has nothing to do with the task."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, policy = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    total, tokens = 0.0, 0
    for story in stories:
        ids = torch.tensor([tokenizer(story["text"])["input_ids"]])
        with torch.no_grad():
            total += policy(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        tokens += ids.shape[1] - 1
    return total / tokens


def rows_of(path: Path) -> list[Row]:
    """Of a file with one JSON object a line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def main() -> None:
    """Print the figures, and write them with samples and curve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("written", type=Path, nargs="+", help="PPO runs, and files of `proximo generate --output`")
    parser.add_argument("--data", type=Path, default=Path("data"), help="the folder that data.py made")
    parser.add_argument("--losses", nargs="*", default=[], help="models whose loss on stories is wanted")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    sentiment = given.data / "sentiment"
    judge = Judge(rows_of(sentiment / "reviews_train.jsonl"))
    found: Row = {
        "judge": {
            "held-out reviews": judge.accuracy(rows_of(sentiment / "reviews_held_out.jsonl")),
            "sentences of SST-2": round(judge.accuracy(rows_of(sentiment / "sst2_dev.jsonl")), 3),
        },
        "written": [
            of_run(judge, path) if path.is_dir() else {"file": path.name, **described(judge, rows_of(path))}
            for path in given.written
        ],
        "story_loss": {
            model: round(story_loss(model, rows_of(given.data / "lm_corpus/stories.jsonl")[:40]), 4)
            for model in given.losses
        },
    }
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for each in (found["judge"], *found["written"], found["story_loss"]):
        print({key: value for key, value in each.items() if key not in {"curve", "samples", "judged"}})


if __name__ == "__main__":
    main()
