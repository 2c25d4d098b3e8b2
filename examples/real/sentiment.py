"""Judges what the sentiment runs wrote: `python examples/real/sentiment.py runs/sentiment-ppo --out results.json`.

Two judges, naive Bayes on words and pairs of neighbouring words. Neither took part in a training, and both read the
continuation alone, without the opening:

- *reviews* learned from 500 whole reviews of `movie_reviews`, in pieces of 20 words;
- *sentences* learned from the sentences of SST-2 that the reward model has not seen.
"""

import argparse
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from proximo.recipes.pairing import label_pairs

Row = dict[str, Any]
Judge = Callable[[Sequence[str]], list[bool]]
"""Of each text, whether it is positive."""
PIECE = 20
NUM_STORIES = 20
SHOWN = 10
"""Samples of the results: the first ten of the held-out openings."""


class WordsJudge:
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

    def __call__(self, texts: Sequence[str]) -> list[bool]:
        """Of each text, whether it is positive."""
        return [sum(self._weights.get(word, 0.0) for word in features(text)) > 0 for text in texts]


def judges_of(folder: Path) -> dict[str, Judge]:
    """Both, from the folder with the data of sentiment."""
    recipe = yaml.safe_load((Path(__file__).parent / "sentiment-reward.yaml").read_text(encoding="utf-8"))
    training = {**recipe["data"]["sources"][0]["kwargs"], "path": str(folder / "sst2_train.jsonl")}
    seen = {pair[which] for pair in label_pairs(**training) for which in ("chosen", "rejected")}
    unseen = [row for row in rows_of(folder / "sst2_train.jsonl") if row["text"] not in seen]
    return {"reviews": WordsJudge(rows_of(folder / "reviews_train.jsonl")), "sentences": WordsJudge(unseen)}


def features(text: str) -> set[str]:
    """Words and pairs of neighbouring words, in lower case."""
    words = re.findall(r"[a-z]+(?:'[a-z]+)?", text.lower())
    return {*words, *(f"{first} {second}" for first, second in pairwise(words))}


def accuracy(judge: Judge, rows: Sequence[Row]) -> float:
    """The share of labelled texts that it judges as labelled."""
    found = judge([row["text"] for row in rows])
    return round(mean(positive == bool(row["label"]) for positive, row in zip(found, rows, strict=True)), 3)


def interval(share: float, number: int) -> tuple[float, float]:
    """Wilson's, at 95%."""
    z = 1.96
    centre = (share + z * z / (2 * number)) / (1 + z * z / number)
    half = z / (1 + z * z / number) * math.sqrt(share * (1 - share) / number + z * z / (4 * number * number))
    return round(centre - half, 3), round(centre + half, 3)


def distinct_pairs(texts: Iterable[str]) -> float:
    """Different pairs of neighbouring words as a share of all: low where texts repeat themselves."""
    pairs = [pair for text in texts for pair in pairwise(text.split())]
    return len(set(pairs)) / max(len(pairs), 1)


def described(judges: dict[str, Judge], rows: Sequence[Row]) -> Row:
    """Figures of continuations, each to the end of its line. `verdicts`: 1 for positive, in their order."""
    texts = [row["response"].split("\n")[0] for row in rows]
    verdicts = {name: judge(texts) for name, judge in judges.items()}
    scores = [row["score"] for row in rows if row["score"] is not None]
    return {
        "continuations": len(rows),
        **{f"positive by {name}": round(mean(found), 3) for name, found in verdicts.items()},
        **{f"interval by {name}": interval(mean(found), len(rows)) for name, found in verdicts.items()},
        "score": round(mean(scores), 3) if scores else None,
        "tokens": round(mean(row["num_tokens"] for row in rows), 2),
        "distinct_pairs": round(distinct_pairs(texts), 3),
        "verdicts": {name: "".join(str(int(positive)) for positive in found) for name, found in verdicts.items()},
    }


def of_run(judges: dict[str, Judge], run: Path) -> Row:
    """Before and after, the curve of the steps, and the first ten openings with both continuations."""
    written = [row for row in rows_of(run / "samples.jsonl") if row["kind"] == "evaluation"]
    metrics = rows_of(run / "metrics.jsonl")
    first, last = ([row for row in written if row["step"] == step] for step in (0, max(row["step"] for row in written)))
    after = {row["prompt_id"]: row["response"] for row in last}
    named = ("prompt_id", "prompt", "response")
    return {
        "run": run.name,
        "seconds": round(sum(row.get("time/step_seconds", 0) for row in metrics)),
        "peak_mib": round(max(row.get("memory/peak_mib", 0) for row in metrics)),
        "kl": round(metrics[-1]["evaluation/kl"], 2),
        "before": described(judges, first),
        "after": described(judges, last),
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
        "samples": [{**{key: row[key] for key in named}, "after": after[row["prompt_id"]]} for row in first[:SHOWN]],
        "prompt_ids": " ".join(row["prompt_id"] for row in first),
    }


def story_loss(model: str, stories: Sequence[Row]) -> float:
    """Mean nats per token of text that has nothing to do with the task."""
    tokenizer, policy = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    total, tokens = 0.0, 0
    for story in stories:
        ids = torch.tensor([tokenizer(story["text"])["input_ids"]])
        with torch.no_grad():
            total += policy(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        tokens += ids.shape[1] - 1
    return round(total / tokens, 4)


def rows_of(path: Path) -> list[Row]:
    """Of a file with one JSON object a line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def main() -> None:
    """Print the figures, and write them with samples and curve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("written", type=Path, nargs="+", help="PPO runs, and files of `proximo generate --output`")
    parser.add_argument("--losses", nargs="*", default=[], help="models whose loss on stories is wanted")
    parser.add_argument("--data", type=Path, default=Path("data"), help="the folder that data.py made")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    sentiment = given.data / "sentiment"
    judges = judges_of(sentiment)
    sentences = rows_of(sentiment / "sst2_dev.jsonl")
    stories = rows_of(given.data / "lm_corpus/stories.jsonl")[:NUM_STORIES]
    found: Row = {
        "accuracy on sentences of SST-2": {name: accuracy(judge, sentences) for name, judge in judges.items()},
        "written": [
            of_run(judges, path) if path.is_dir() else {"file": path.name, **described(judges, rows_of(path))}
            for path in given.written
        ],
        "story_loss": {model: story_loss(model, stories) for model in given.losses},
    }
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    shown = [{key: found[key] for key in found if key != "written"}, *found["written"]]
    for each in (part for row in shown for part in (row.get("before"), row.get("after"), row) if part):
        print(json.dumps({key: value for key, value in each.items() if key not in HIDDEN}))


HIDDEN = {"before", "after", "curve", "samples", "prompt_ids", "verdicts"}
"""What is written and not printed."""


if __name__ == "__main__":
    main()
