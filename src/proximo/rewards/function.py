"""The reward source that calls a Python function of the user. The function is trusted: it runs in this process."""

import contextvars
import queue
import re
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from proximo.errors import ConfigError, ProximoError, TrainingError
from proximo.message_text import count_of
from proximo.metrics.definitions import COMPONENT
from proximo.metrics.values import MetricValue
from proximo.records import Prompt, Response, Scored
from proximo.rewards.calling.binding import BoundFunction, function_name
from proximo.rewards.function_results import FunctionResult, as_scored, columns_checked, function_inputs
from proximo.rewards.statistics import BatchStatistics
from proximo.user_code import error_text, where_raised
from proximo_verifiers.progress_log import LOG_EVERY_SECONDS, log_progress

RewardFunction = Callable[..., Sequence[FunctionResult] | Awaitable[Sequence[FunctionResult]]]
"""Called with what its parameters name (`calling/binding.py`): lists with one entry for each response."""
_Answer = tuple[Any, BaseException | None]


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
        answers: queue.Queue[_Answer] = queue.Queue()

        def work() -> None:
            try:
                answers.put((self._bound(**inputs, columns=self._columns), None))
            except BaseException as error:
                answers.put((None, error))

        context = contextvars.copy_context()
        threading.Thread(target=lambda: context.run(work), daemon=True, name=f"reward-{self.name}").start()
        results, error = self._wait(answers, len(inputs["responses"]))
        if isinstance(error, ProximoError):
            raise error
        if error is not None:
            location = where_raised(error, self.function)
            raise TrainingError(f"reward function {self.name!r} raised {error_text(error)} ({location})") from error
        return results

    def _wait(self, answers: queue.Queue[_Answer], num_responses: int) -> _Answer:
        start = time.monotonic()
        while (waited := time.monotonic() - start) < self.timeout_seconds:
            try:
                return answers.get(timeout=min(LOG_EVERY_SECONDS, self.timeout_seconds - waited))
            except queue.Empty:
                log_progress(self.name, 0, num_responses, time.monotonic() - start)
        raise TrainingError(
            f"reward function {self.name!r} did not answer for {count_of(num_responses, 'response')} "
            f"within timeout_seconds = {self.timeout_seconds:g}"
        )
