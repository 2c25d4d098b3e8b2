"""Checks and combines the per-token rewards of sources. How they are shaped: algorithms/shaping.py."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from proximo.errors import TrainingError
from proximo.records import Response, Scored, ScoreState


def scored_by_token(
    response: Response, rewards: Any, *, name: str, components: Mapping[str, float] | None = None
) -> Scored:
    """The response with a reward for each of its tokens. Its score is their sum.

    `rewards` is a sequence (list, array, tensor) with one number per token, or a mapping from token index to number; a
    missing index means 0. A None or a number that is not finite leaves the response without a score. `name` is the name
    of the source. Raises TrainingError for anything else.
    """
    numbers = _numbers(rewards, len(response.token_ids), name=name)
    if not all(math.isfinite(number) for number in numbers):
        reason = f"{name} gave a token a reward that is not a finite number"
        return Scored(response=response, score=math.nan, state=ScoreState.INFRASTRUCTURE_FAULT, reason=reason)
    return Scored(response=response, score=math.fsum(numbers), components=components or {}, token_rewards=numbers)


def scored_by_prefix(response: Response, prefix_scores: Sequence[float], *, name: str) -> Scored:
    """The response with scores of each of its prefixes.

    `prefix_scores` are the score of the prompt alone and the scores after each token, so one more than there are
    tokens. The last is the score of the response.
    """
    if not all(math.isfinite(score) for score in prefix_scores):
        reason = f"{name} gave a part of the response a score that is not a finite number"
        return Scored(response=response, score=math.nan, state=ScoreState.INFRASTRUCTURE_FAULT, reason=reason)
    return Scored(response=response, score=prefix_scores[-1], prefix_scores=tuple(prefix_scores))


def weighted_sum(parts: Sequence[tuple[float, Sequence[float] | None]]) -> tuple[float, ...] | None:
    """The weighted sum per token over the sources that have per-token numbers; None if no source has them."""
    rows = [[weight * number for number in numbers] for weight, numbers in parts if numbers]
    return tuple(math.fsum(column) for column in zip(*rows, strict=True)) if rows else None


def _numbers(rewards: Any, num_tokens: int, *, name: str) -> tuple[float, ...]:
    if hasattr(rewards, "tolist"):  # numpy arrays and tensors
        rewards = rewards.tolist()
    try:
        if isinstance(rewards, Mapping):
            by_index = {int(index): as_number(number) for index, number in rewards.items()}
            if all(0 <= index < num_tokens for index in by_index):
                return tuple(by_index.get(index, 0.0) for index in range(num_tokens))
        elif is_list(rewards) and len(rewards) == num_tokens:
            return tuple(as_number(number) for number in rewards)
    except (TypeError, ValueError):
        pass  # reported below
    raise TrainingError(
        f"token_rewards of {name!r} must be one number for each of the {num_tokens} tokens of the response "
        f"(metadata['token_ids']), or a mapping from indices 0 to {num_tokens - 1} to numbers; got {rewards!r:.80}"
    )


def is_list(value: Any) -> bool:
    """True for a sequence of values. Text and bytes are single values here, although Python calls them sequences."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def as_number(value: Any) -> float:
    """The value as a float, NaN for None.

    Raises TypeError for text, which `float` would parse, and for anything that is not a number; ValueError for an
    integer beyond the range of floats.
    """
    if isinstance(value, str | bytes | bytearray):
        raise TypeError(f"expected a number, got {value!r:.80}")
    if hasattr(value, "detach"):  # float() of a tensor that requires a gradient warns
        value = value.detach()
    try:
        return math.nan if value is None else float(value)
    except OverflowError as error:
        raise ValueError("a number beyond 1.8e308") from error
