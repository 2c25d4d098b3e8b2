"""Generates sums in steps, some with errors, for trying process reward models.

Row i depends only on (seed, i).
"""

from collections.abc import Iterator
from random import Random
from typing import Any

from proximo.errors import ConfigError


def rows(
    num_rows: int, seed: int = 0, *, num_terms: int = 4, largest: int = 9, careless: float = 0.2
) -> Iterator[dict[str, Any]]:
    """Sums of `num_terms` numbers from 1 to `largest`, added up one by one.

    A row has `prompt` (`3+4+2`, a line end), `steps` (`3+4=7`, `7+2=9`) with `labels`, `response` (the steps in lines)
    and `answer` (`9`). A step has a wrong result with probability `careless`; it and all later steps, which continue
    from that result, are labelled wrong.

    Raises:
        ConfigError: the options allow no sum, or no wrong result.
    """
    if num_terms < 2 or largest < 2:
        raise ConfigError(f"num_terms and largest of sums must be at least 2, got {num_terms} and {largest}")
    if not 0 <= careless <= 1:
        raise ConfigError(f"careless is a probability from 0 to 1, got {careless}")
    for row in range(num_rows):
        rng = Random(f"{seed}/{row}")
        first, *terms = [rng.randint(1, largest) for _ in range(num_terms)]
        total, steps, labels = first, list[str](), list[bool]()
        for term in terms:
            right = total + term
            wrong = rng.random() < careless
            result = rng.choice([each for each in range(2, right + largest) if each != right]) if wrong else right
            steps.append(f"{total}+{term}={result}")
            labels.append(not wrong and all(labels))
            total = result
        yield {
            "prompt": "+".join(map(str, (first, *terms))) + "\n",
            "steps": steps,
            "labels": labels,
            "response": "\n".join(steps),
            "answer": str(first + sum(terms)),
        }
