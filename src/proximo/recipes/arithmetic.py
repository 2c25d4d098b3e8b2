"""Sums with a known answer: prompts and a reward for the recipes with a function. An example to replace.

proximo ppo ppo-function
"""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

NUMBER = re.compile(r"-?\d+(?:,\d{3})*")


def problems(num_rows: int = 5000, *, seed: int = 0, largest: int = 999) -> Iterator[dict[str, Any]]:
    """Rows with a conversation that asks for a sum or a difference, and its answer."""
    rng = random.Random(seed)
    for _ in range(num_rows):
        first, second = rng.randint(0, largest), rng.randint(0, largest)
        sign = rng.choice("+-")
        question = f"What is {first} {sign} {second}? Think in one short sentence, then end with the number."
        answer = first + second if sign == "+" else first - second
        yield {"prompt": [{"role": "user", "content": question}], "answer": str(answer)}


def correct(responses: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """1 for a response whose last number is the answer, 0 for any other; beside it, whether it ended by itself.

    The components are logged, and only `score` is trained on.
    """
    return [_judged(response, facts) for response, facts in zip(responses, metadata, strict=True)]


def _judged(response: str, facts: Mapping[str, Any]) -> dict[str, float]:
    numbers = NUMBER.findall(response)
    right = bool(numbers) and int(numbers[-1].replace(",", "")) == int(facts["answer"])
    return {"score": float(right), "ended": float(facts["finish"] != "length")}
