"""The reward source that calls a Python function of the user. The function is trusted: it runs in this process."""

import contextvars
import importlib
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from proximo.callables import calling_problem, place_of, said
from proximo.errors import ConfigError, TrainingError
from proximo.metrics.definitions import COMPONENT
from proximo.metrics.values import MetricValue
from proximo.records import Response, Scored
from proximo.rewards.function_results import FunctionResult, as_scored, function_inputs
from proximo.rewards.progress_log import LOG_EVERY_SECONDS, log_progress
from proximo.rewards.statistics import BatchStatistics
from proximo.working_directory import kept_working_directory

RewardFunction = Callable[..., Sequence[FunctionResult]]
"""Called as `function(prompts, responses, metadata, **kwargs)` with three lists of equal length."""
_Answer = tuple[Any, BaseException | None]


def import_function(path: str) -> Callable[..., Any]:
    """Imports the function `package.module:function`, or an object with a method `score`.

    Raises ConfigError if there is none.
    """
    module_name, separator, name = path.partition(":")
    if not separator or not module_name or not name:
        raise ConfigError(f"a function is named package.module:function, got {path!r}")
    try:
        with kept_working_directory():
            module = importlib.import_module(module_name)
    except Exception as error:  # importing runs the user's code, which may raise anything
        raise ConfigError(
            f"function {path!r}: module {module_name!r} cannot be imported ({type(error).__name__}: {error}); "
            "is it installed or in the folder that you started from, and can it be imported on its own?"
        ) from error
    function = vars(module).get(name)
    if not callable(function) and not hasattr(function, "score"):
        known = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise ConfigError(f"function {path!r}: {module_name} has no function {name!r}; it has {', '.join(known[:8])}")
    return function


def function_name(function: Any) -> str:
    """What a reward function is called in metrics: by its own name; `function` where it has none, such as a lambda."""
    name = str(getattr(function, "__name__", type(function).__name__))
    return name if re.fullmatch(COMPONENT, name) else "function"


class FunctionReward:
    """Calls a function once per batch with prompts (text or messages), response texts and metadata.

    The metadata of a response are the columns of its row, the prompt's reference answer as `answer` if it has one, the
    reason why the response ended as `finish`, and its tokens as `token_ids`.
    """

    concurrent = True

    def __init__(
        self,
        function: RewardFunction,
        *,
        name: str = "function",
        kwargs: Mapping[str, Any] | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        """`kwargs` are passed to the function by keyword. Raises ConfigError if the function cannot be called with
        them, and for an invalid name or timeout."""
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
        check_reward_function(function, self.kwargs, name=repr(name))
        self._statistics = BatchStatistics()

    def score(self, responses: Sequence[Response]) -> list[Scored]:
        """One score per response. Raises TrainingError if the function raises, takes too long or returns no scores."""
        if not responses:
            return []
        start = time.monotonic()
        scored = as_scored(responses, self._call(*function_inputs(responses)), name=self.name)
        self._statistics.count(scored, time.monotonic() - start)
        return scored

    def statistics(self) -> dict[str, MetricValue]:
        """The metrics of this source since the last call. Its seconds are those of whole batches."""
        return self._statistics.taken(self.name)

    def _call(self, *lists: list[Any]) -> Any:
        """Runs the function in its own thread, so that a function that hangs ends the run instead of blocking it."""
        answers: queue.Queue[_Answer] = queue.Queue()

        def work() -> None:
            try:
                answers.put((self.function(*lists, **self.kwargs), None))
            except BaseException as error:
                answers.put((None, error))

        context = contextvars.copy_context()
        threading.Thread(target=lambda: context.run(work), daemon=True, name=f"reward-{self.name}").start()
        results, error = self._wait(answers, len(lists[0]))
        if error is not None:
            location = place_of(error, self.function)
            raise TrainingError(f"reward function {self.name!r} raised {said(error)} ({location})") from error
        return results

    def _wait(self, answers: queue.Queue[_Answer], num_responses: int) -> _Answer:
        start = time.monotonic()
        while (waited := time.monotonic() - start) < self.timeout_seconds:
            try:
                return answers.get(timeout=min(LOG_EVERY_SECONDS, self.timeout_seconds - waited))
            except queue.Empty:
                log_progress(self.name, 0, num_responses, time.monotonic() - start)
        raise TrainingError(
            f"reward function {self.name!r} did not answer for {num_responses} responses "
            f"within timeout_seconds = {self.timeout_seconds:g}"
        )


def check_reward_function(function: Callable[..., Any], arguments: Mapping[str, Any], *, name: str) -> None:
    """Raises ConfigError if the function cannot be called as it will be, so that a mistake costs no rollout."""
    if problem := calling_problem(function, ([], [], []), arguments):
        given = "".join(f", {key}=..." for key in arguments)
        raise ConfigError(
            f"reward function {name} is called as function(prompts, responses, metadata{given}) and returns one score "
            f"per response, but {problem}"
        )
