"""Rewards of single tokens as a source states them, checked. Not how a score and they become rewards: shaping.py."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from proximo.errors import TrainingError
from proximo.records import Response, Scored, ScoreState


def scored_by_token(
    response: Response, given: Any, *, name: str, components: Mapping[str, float] | None = None
) -> Scored:
    """The response with a reward for each of its tokens; its score is their sum.

    `given` is a list (array, tensor) of as many numbers as the response has tokens, or a mapping from token indices to
    numbers, 0 elsewhere. A number that is none, or not finite, leaves the response without a score. Raises
    TrainingError for anything else; `name` is the source's.
    """
    numbers = _numbers(given, len(response.token_ids), name=name)
    if not all(math.isfinite(number) for number in numbers):
        reason = f"{name} gave a token a reward that is no number"
        return Scored(response=response, score=math.nan, state=ScoreState.INFRASTRUCTURE_FAULT, reason=reason)
    return Scored(response=response, score=math.fsum(numbers), components=components or {}, token_rewards=numbers)


def scored_by_prefix(response: Response, prefix_scores: Sequence[float], *, name: str) -> Scored:
    """The response with the scores of its prompt alone and after each of its tokens; the last one is its score."""
    if not all(math.isfinite(score) for score in prefix_scores):
        reason = f"{name} gave a part of the response a score that is no number"
        return Scored(response=response, score=math.nan, state=ScoreState.INFRASTRUCTURE_FAULT, reason=reason)
    return Scored(response=response, score=prefix_scores[-1], prefix_scores=tuple(prefix_scores))


def weighted_sum(parts: Sequence[tuple[float, Sequence[float] | None]]) -> tuple[float, ...] | None:
    """Weight times the numbers of each token, added up over the sources that have them; None where none has."""
    rows = [[weight * number for number in numbers] for weight, numbers in parts if numbers]
    return tuple(math.fsum(column) for column in zip(*rows, strict=True)) if rows else None


def _numbers(given: Any, num_tokens: int, *, name: str) -> tuple[float, ...]:
    if hasattr(given, "tolist"):  # arrays of numpy and tensors
        given = given.tolist()
    try:
        if isinstance(given, Mapping):
            placed = {int(index): as_number(number) for index, number in given.items()}
            if all(0 <= index < num_tokens for index in placed):
                return tuple(placed.get(index, 0.0) for index in range(num_tokens))
        elif is_list(given) and len(given) == num_tokens:
            return tuple(as_number(number) for number in given)
    except (TypeError, ValueError):
        pass  # the message below says what was wanted
    raise TrainingError(
        f"token_rewards of {name!r} must be one number for each of the {num_tokens} tokens of the response "
        f"(metadata['token_ids']), or a mapping from indices 0 to {num_tokens - 1} to numbers; got {given!r:.80}"
    )


def is_list(given: Any) -> bool:
    """A sequence of values: text and bytes are one value each, although Python calls them sequences."""
    return isinstance(given, Sequence) and not isinstance(given, str | bytes | bytearray | memoryview)


def as_number(given: Any) -> float:
    """NaN for None. Raises TypeError for text, which Python would read as a number, and for what is none; ValueError
    for a whole number beyond all floats."""
    if isinstance(given, str | bytes | bytearray):
        raise TypeError(f"a number is wanted, got {given!r:.80}")
    if hasattr(given, "detach"):  # torch warns where a gradient is left behind, and here it is meant
        given = given.detach()
    try:
        return math.nan if given is None else float(given)
    except OverflowError as error:
        raise ValueError("a number beyond 1.8e308") from error
