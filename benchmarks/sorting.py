"""A task with exact rewards, small enough for a CPU: write some digits in order. Rows for fine-tuning and for PPO.

The prompt is `sort 3141 =`, the right answer `1134`. Fine-tuning sees a share of answers whose digits are shuffled, so
that the policy knows the form and is often wrong: that is what is left for PPO.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def examples(num_rows: int, *, seed: int = 0, digits: int = 6, shuffled: float = 0.5) -> Iterator[dict[str, str]]:
    """Prompts with answers, of which the share `shuffled` is in random order."""
    rng = random.Random(f"examples/{seed}")
    for _ in range(num_rows):
        row = _problem(rng, digits)
        answer = list(row["answer"])
        if rng.random() < shuffled:
            rng.shuffle(answer)
        yield {"prompt": row["prompt"], "response": " " + " ".join(answer)}


def problems(num_rows: int, *, seed: int = 0, digits: int = 6) -> Iterator[dict[str, str]]:
    """Prompts with the digits of the right answer as metadata."""
    rng = random.Random(f"problems/{seed}")
    for _ in range(num_rows):
        yield _problem(rng, digits)


def pairs(num_rows: int, *, seed: int = 0, digits: int = 6, swapped: float = 0.0) -> Iterator[dict[str, str]]:
    """Preference pairs, right before shuffled; the share `swapped` has its labels the wrong way round."""
    rng = random.Random(f"pairs/{seed}")
    for _ in range(num_rows):
        row = _problem(rng, digits)
        right, wrong = list(row["answer"]), list(row["answer"])
        while wrong == right and len(set(right)) > 1:
            rng.shuffle(wrong)
        both = [" " + " ".join(right), " " + " ".join(wrong)]
        chosen, rejected = reversed(both) if rng.random() < swapped else both
        yield {"prompt": row["prompt"], "chosen": chosen, "rejected": rejected}


def in_order(prompts: Sequence[Any], responses: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> list[float]:
    """1 where the response is the answer, 0 where it is not."""
    del prompts  # the metadata say what is right
    return [float(text.split() == list(facts["answer"])) for text, facts in zip(responses, metadata, strict=True)]


def begins_well(prompts: Sequence[Any], responses: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> list[float]:
    """An easier task: 1 where the first digit of the response is the smallest of all."""
    del prompts
    return [float(text.split()[:1] == [facts["answer"][0]]) for text, facts in zip(responses, metadata, strict=True)]


def digits_sorted(prompt: str) -> str:
    """The right answer to a prompt of this task, without spaces."""
    return "".join(sorted(character for character in prompt if character.isdigit()))


def length(prompts: Sequence[Any], responses: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> list[float]:
    """A bad reward: the share of 20 digits that the response has, whatever they are."""
    del prompts, metadata
    return [min(len(text.split()) / 20, 1.0) for text in responses]


def shortness(prompts: Sequence[Any], responses: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> list[float]:
    """A bad reward: less for every character."""
    del prompts, metadata
    return [1 - min(len(text) / 20, 1.0) for text in responses]


def always_one(prompts: Sequence[Any], responses: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> list[float]:
    """A reward that tells nothing."""
    del prompts, metadata
    return [1.0] * len(responses)


def noise(prompts: Sequence[Any], responses: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> list[float]:
    """A reward that has nothing to do with the answer, and differs from answer to answer."""
    del prompts
    texts = (f"{facts['answer']}/{text}" for text, facts in zip(responses, metadata, strict=True))
    return [float(random.Random(text).random() < 0.3) for text in texts]


def failing(
    prompts: Sequence[Any], responses: Sequence[str], metadata: Sequence[Mapping[str, Any]]
) -> list[float | None]:
    """A reward that cannot judge a tenth of the answers: those that end in a certain digit."""
    del prompts, metadata
    return [None if text.strip().endswith("7") else float(len(set(text)) / 8) for text in responses]


def _problem(rng: random.Random, digits: int) -> dict[str, str]:
    drawn = [rng.choice("0123456789") for _ in range(digits)]
    return {"prompt": f"sort {' '.join(drawn)} =", "answer": "".join(sorted(drawn))}
