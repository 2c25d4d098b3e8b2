"""The reward source that calls a Python function of the user, which is trusted."""

import contextvars
import math
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from proximo.distributed.world import in_background
from proximo.errors import ConfigError, DataError, ProximoError, TrainingError
from proximo.message_text import count_of
from proximo.metrics.definitions import COMPONENT
from proximo.metrics.values import MetricValue
from proximo.records import Finish, Prompt, Response, Scored, ScoreState
from proximo.rewards.function_binding import OF_A_RESPONSE, BoundFunction, WantedColumns, function_name
from proximo.rewards.source import BatchStatistics, as_number, is_list, scored_by_token
from proximo.user_code import error_text, where_raised
from proximo_verifiers.progress_log import LOG_EVERY_SECONDS, log_progress

FunctionResult = float | int | Mapping[str, Any] | None
"""A score; a mapping with `score` or `token_rewards`, and components; or None where the function does not apply."""
RewardFunction = Callable[..., Sequence[FunctionResult] | Awaitable[Sequence[FunctionResult]]]
"""Called with what its parameters name (`function_binding.py`): lists with one entry for each response."""
TEXT_PROMPTS = "prompts are text here, and so are the completions; data.as_messages=true makes both conversations"


class FunctionReward:
    """Calls a function once per batch, with what its parameters name.

    `prompts` (text or messages), `responses` (text), `completions` (as TRL has them), `completion_ids`, `metadata`, or
    a column of the rows: each a list with one entry for each response. The metadata of a response are the columns of
    its row, the reason why the response ended as `finish`, and its tokens as `token_ids`.
    """

    concurrent = True

    def __init__(
        self,
        function: RewardFunction,
        *,
        name: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        """`name`: None for the function's own. `kwargs` are passed to the function by keyword.

        Raises ConfigError if its parameters cannot be bound, and for an invalid name or timeout.
        """
        name = function_name(function) if name is None else name
        if not isinstance(name, str) or not re.fullmatch(COMPONENT, name):
            raise ConfigError(
                f"the name of a reward is part of metric names: use letters, digits, '_', '.' and '-', got {name!r:.60}"
            )
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise ConfigError(
                f"kwargs of reward function {name!r} must be a mapping from their names to their values, got "
                f"{type(kwargs).__name__}"
            )
        if isinstance(timeout_seconds, bool) or not isinstance(timeout_seconds, int | float) or not timeout_seconds > 0:
            raise ConfigError(
                f"timeout_seconds of reward function {name!r} must be a number of seconds above 0, got "
                f"{timeout_seconds!r:.60}"
            )
        self.name = name
        self.function = function
        self.kwargs = dict(kwargs or {})
        self.timeout_seconds = timeout_seconds
        self._bound = BoundFunction(function, self.kwargs, name=repr(name))
        self._columns: tuple[str, ...] = ()
        self._statistics = BatchStatistics()

    def score(self, responses: Sequence[Response]) -> list[Scored]:
        """One score per response. Raises TrainingError if the function raises, takes too long or returns no scores."""
        if not responses:
            return []
        start = time.monotonic()
        scored = as_scored(responses, self._call(function_inputs(responses)), name=self.name)
        self._statistics.count(scored, time.monotonic() - start)
        return scored

    def check_prompts(self, prompts: Sequence[Prompt], origins: Mapping[str, str]) -> None:
        """Raises DataError for a prompt whose row lacks a column that the function needs.

        `origins` has its file and row by its id.
        """
        self._columns = columns_checked(prompts, origins, self._bound.wanted, before=self._columns, name=self.name)

    def close(self) -> None:
        """Ends the event loop of an async function."""
        self._bound.close()

    def statistics(self) -> dict[str, MetricValue]:
        """The metrics of this source since the last call. Its seconds are those of whole batches."""
        return self._statistics.taken(self.name)

    def _call(self, inputs: Mapping[str, list[Any]]) -> Any:
        """Runs the function in its own thread, so that a function that hangs ends the run instead of blocking it."""
        context = contextvars.copy_context()
        call = partial(context.run, self._bound, **inputs, columns=self._columns)
        answer = in_background(call, name=f"reward-{self.name}")
        self._wait(answer, len(inputs["responses"]))
        try:
            return answer.result()
        except ProximoError:
            raise
        except BaseException as error:
            location = where_raised(error, self.function)
            wants_messages = "string indices must be" in str(error) and isinstance(inputs["prompts"][0], str)
            advice = f": {TEXT_PROMPTS}" if wants_messages else ""
            raise TrainingError(
                f"reward function {self.name!r} raised {error_text(error)} ({location}){advice}"
            ) from error

    def _wait(self, answer: Future[Any], num_responses: int) -> None:
        start = time.monotonic()
        while (waited := time.monotonic() - start) < self.timeout_seconds:
            if wait([answer], min(LOG_EVERY_SECONDS, self.timeout_seconds - waited)).done:
                return
            log_progress(self.name, 0, num_responses, time.monotonic() - start)
        raise TrainingError(
            f"reward function {self.name!r} did not answer for {count_of(num_responses, 'response')} "
            f"within timeout_seconds = {self.timeout_seconds:g}"
        )


def function_inputs(responses: Sequence[Response]) -> dict[str, list[Any]]:
    """The inputs of `BoundFunction`: prompts (text, or messages), what was answered, metadata, answers of the rows."""
    prompts = [r.prompt.text if r.prompt.text is not None else list(r.prompt.messages or ()) for r in responses]
    return {
        "prompts": prompts,
        "responses": [r.text for r in responses],
        "completions": [_completion(*pair) for pair in zip(prompts, responses, strict=True)],
        "metadata": [_metadata(r) for r in responses],
        "answers": [r.prompt.metadata.get("answer", r.prompt.answer) for r in responses],
    }


def _completion(prompt: Any, response: Response) -> Any:
    """The response in TRL's form: where the prompt is a conversation, the messages after it, else the text."""
    if isinstance(prompt, str):
        return response.text
    said = response.episode.messages if response.episode is not None else ()
    return list(said or [{"role": "assistant", "content": response.text}])


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
