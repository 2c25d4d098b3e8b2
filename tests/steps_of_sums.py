"""A check of the steps of sums, beside the generator of `proximo.recipes.running_sums`."""

from collections.abc import Sequence


def step_labels(prompt: str, steps: Sequence[str]) -> list[bool]:
    """Whether each step of a sum is right: the next term added to the right result before it, and nothing else."""
    total, *terms = map(int, prompt.strip().split("+"))
    right = []
    for term in terms:
        right.append(f"{total}+{term}={total + term}")
        total += term
    matching = [index < len(right) and step == right[index] for index, step in enumerate(steps)]
    return [all(matching[: index + 1]) for index in range(len(steps))]
