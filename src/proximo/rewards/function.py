"""Scores from a Python function that the user names. Not for code that a model wrote: the function is trusted."""

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
from proximo.rewards.function_results import FunctionResult, as_scored, questions
from proximo.rewards.progress_log import TELL_EVERY_SECONDS, tell
from proximo.rewards.statistics import BatchStatistics
from proximo.working_directory import kept_working_directory

RewardFunction = Callable[..., Sequence[FunctionResult]]
"""Called as `function(prompts, responses, metadata, **kwargs)` with three lists of equal length."""
_Answer = tuple[Any, BaseException | None]


def import_function(path: str) -> Callable[..., Any]:
    """The function behind `package.module:function`. Raises ConfigError where there is none."""
    module_name, separator, name = path.partition(":")
    if not separator or not module_name or not name:
        raise ConfigError(f"a function is named as package.module:function, got {path!r}")
    try:
        with kept_working_directory():
            module = importlib.import_module(module_name)
    except Exception as error:  # it is the user's code that runs here
        raise ConfigError(
            f"function {path!r}: module {module_name!r} cannot be imported ({type(error).__name__}: {error}); "
            "is it installed or in the folder that you started from, and does it import by itself?"
        ) from error
    found = vars(module).get(name)
    if not callable(found):
        known = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise ConfigError(f"function {path!r}: {module_name} has no function {name!r}; it has {', '.join(known[:8])}")
    return found


class FunctionReward:
    """Calls the function once per batch, with texts: prompts (text, or messages), responses and metadata.

    The metadata holds the prompt's reference answer as `answer` where it has one, and of the response why it ended as
    `finish` and its tokens as `token_ids`.
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
        """Raises ConfigError for what is no function of these arguments, and for a name or a time-out that is none."""
        if not isinstance(name, str) or not re.fullmatch(COMPONENT, name):
            raise ConfigError(
                f"the name of a reward is letters, digits, '_', '.' and '-', since metrics carry it; got {name!r:.60}"
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
        """Raises TrainingError where the function raises, takes too long, or returns something else than scores."""
        if not responses:
            return []
        start = time.monotonic()
        scored = as_scored(responses, self._call(*questions(responses)), name=self.name)
        self._statistics.count(scored, time.monotonic() - start)
        return scored

    def statistics(self) -> dict[str, MetricValue]:
        """The metrics of this source since they were last asked for; its seconds are those of whole batches."""
        return self._statistics.taken(self.name)

    def _call(self, *lists: list[Any]) -> Any:
        """Runs the function in a thread of its own, so that one that hangs ends the run instead of holding it."""
        answers: queue.Queue[_Answer] = queue.Queue()

        def work() -> None:
            try:
                answers.put((self.function(*lists, **self.kwargs), None))
            except BaseException as error:
                answers.put((None, error))

        threading.Thread(target=work, daemon=True, name=f"reward-{self.name}").start()
        results, error = self._wait(answers, len(lists[0]))
        if error is not None:
            place = place_of(error, self.function)
            raise TrainingError(f"reward function {self.name!r} raised {said(error)} ({place})") from error
        return results

    def _wait(self, answers: queue.Queue[_Answer], num_responses: int) -> _Answer:
        start = time.monotonic()
        while (waited := time.monotonic() - start) < self.timeout_seconds:
            try:
                return answers.get(timeout=min(TELL_EVERY_SECONDS, self.timeout_seconds - waited))
            except queue.Empty:
                tell(self.name, 0, num_responses, time.monotonic() - start)
        raise TrainingError(
            f"reward function {self.name!r} did not answer for {num_responses} responses "
            f"within timeout_seconds = {self.timeout_seconds:g}"
        )


def check_reward_function(function: Callable[..., Any], arguments: Mapping[str, Any], *, name: str) -> None:
    """Raises ConfigError where it cannot be called as it will be, so that a mistake costs no rollout."""
    if problem := calling_problem(function, ([], [], []), arguments):
        given = "".join(f", {key}=..." for key in arguments)
        raise ConfigError(
            f"reward function {name} is called as function(prompts, responses, metadata{given}) and returns one score "
            f"per response, but {problem}"
        )
