"""The inputs of a reward function and the interpretation of what it returns."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from proximo.errors import DataError, TrainingError
from proximo.metrics.definitions import COMPONENT
from proximo.records import Finish, Prompt, Response, Scored, ScoreState
from proximo.rewards.calling.binding import OF_A_RESPONSE, WantedColumns
from proximo.rewards.token_rewards import as_number, is_list, scored_by_token

FunctionResult = float | int | Mapping[str, Any] | None
"""A score; a mapping with `score` or `token_rewards`, and components; or None where the function does not apply."""


def function_inputs(responses: Sequence[Response]) -> dict[str, list[Any]]:
    """The inputs of `BoundFunction`: prompts (text, or messages), responses, metadata, and the answers of the rows."""
    prompts = [r.prompt.text if r.prompt.text is not None else list(r.prompt.messages or ()) for r in responses]
    return {
        "prompts": prompts,
        "responses": [r.text for r in responses],
        "metadata": [_metadata(r) for r in responses],
        "answers": [r.prompt.metadata.get("answer", r.prompt.answer) for r in responses],
    }


def columns_checked(
    prompts: Sequence[Prompt],
    origins: Mapping[str, str],
    wanted: WantedColumns,
    *,
    before: Iterable[str] = (),
    name: str,
) -> tuple[str, ...]:
    """The columns of all prompts, after those known before. Raises DataError for a row that the function cannot get."""
    columns = dict.fromkeys(before)
    for prompt in prompts:
        own = [*prompt.metadata, *([] if prompt.answer is None else ["answer"])]
        if problem := wanted.problem(own):
            origin = origins.get(prompt.id, f"prompt {prompt.id!r}")
            raise DataError(f"{origin}: reward function {name!r} {problem}")
        columns |= dict.fromkeys([*own, *OF_A_RESPONSE])
    return tuple(columns)


def as_scored(responses: Sequence[Response], results: Any, *, name: str) -> list[Scored]:
    """Converts what the function returned to one `Scored` per response. Raises TrainingError for invalid results."""
    if hasattr(results, "tolist"):  # numpy arrays and tensors
        results = results.tolist()
    if not is_list(results) or len(results) != len(responses):
        count = len(results) if is_list(results) else type(results).__name__
        raise TrainingError(
            f"reward function {name!r} must return one score per response: "
            f"expected {len(responses)}, it returned {count}{_advice(results)}"
        )
    return [_scored(response, result, name=name) for response, result in zip(responses, results, strict=True)]


def _advice(results: Any) -> str:
    if isinstance(results, Iterable) and not isinstance(results, str | bytes | Mapping | Sequence):
        return "; return a list, in the order of the responses"
    return ""


def _scored(response: Response, result: FunctionResult, *, name: str) -> Scored:
    if result is None:
        state, reason = ScoreState.NOT_APPLICABLE, f"{name} returned None: it does not apply"
        return Scored(response=response, score=math.nan, state=state, reason=reason)
    parts = dict(result) if isinstance(result, Mapping) else {"score": result}
    if ("score" in parts) == ("token_rewards" in parts):
        raise TrainingError(
            f"reward function {name!r} must return a mapping with either 'score' or 'token_rewards', whose "
            f"sum is the score; it has {sorted(parts)}"
        )
    token_rewards = parts.pop("token_rewards", None)
    try:
        numbers = {key: as_number(value) for key, value in parts.items()}
    except (TypeError, ValueError) as error:
        raise TrainingError(
            f"reward function {name!r} must return a number, a mapping to numbers or None for each response, "
            f"it returned {result!r:.80}"
        ) from error
    if not all(math.isfinite(number) for number in numbers.values()):
        reason = f"{name} returned {result!r}"
        return Scored(response=response, score=math.nan, state=ScoreState.INFRASTRUCTURE_FAULT, reason=reason)
    unnamed = [key for key in numbers if not re.fullmatch(COMPONENT, key)]
    if unnamed:
        raise TrainingError(
            f"reward function {name!r} returned a component {unnamed[0]!r}, which cannot name a metric: use "
            "letters, digits, '_', '.' and '-' only"
        )
    if token_rewards is not None:
        return scored_by_token(response, token_rewards, name=name, components=numbers)
    score = numbers.pop("score")
    return Scored(response=response, score=score, components=numbers)


def _metadata(response: Response) -> dict[str, Any]:
    answer = {} if response.prompt.answer is None else {"answer": response.prompt.answer}
    finish: Finish = response.finish
    return {**response.prompt.metadata, **answer, "finish": finish.value, "token_ids": response.token_ids}
