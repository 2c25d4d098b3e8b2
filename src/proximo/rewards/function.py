"""Scores from a Python function that the user names. Not for code that a model wrote: the function is trusted."""

import importlib
import inspect
import math
import queue
import re
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from proximo.errors import ConfigError, TrainingError
from proximo.metrics.definitions import COMPONENT
from proximo.records import Finish, Response, Scored, ScoreState
from proximo.rewards.dense import scored_by_token

Verdict = float | int | Mapping[str, Any] | None
"""A score; or a mapping with `score` or `token_rewards`, and components; or None where the function could not tell."""
RewardFunction = Callable[..., Sequence[Verdict]]
"""Called as `function(prompts, responses, metadata, **arguments)` with three lists of equal length."""


def import_function(path: str) -> Callable[..., Any]:
    """The function behind `package.module:function`. Raises ConfigError where there is none."""
    module_name, separator, name = path.partition(":")
    if not separator or not module_name or not name:
        raise ConfigError(f"a function is named as package.module:function, got {path!r}")
    try:
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
        arguments: Mapping[str, Any] | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        self.name = name
        self.function = _callable_with(function, arguments or {}, name=name)
        self.arguments = dict(arguments or {})
        self.timeout_seconds = timeout_seconds

    def score(self, responses: Sequence[Response]) -> list[Scored]:
        """Raises TrainingError where the function raises, takes too long, or returns something else than scores."""
        if not responses:
            return []
        prompts = [r.prompt.text if r.prompt.text is not None else list(r.prompt.messages or ()) for r in responses]
        verdicts = self._call(prompts, [r.text for r in responses], [_metadata(r) for r in responses])
        if hasattr(verdicts, "tolist"):  # arrays of numpy and tensors
            verdicts = verdicts.tolist()
        if not isinstance(verdicts, Sequence) or len(verdicts) != len(responses):
            count = len(verdicts) if isinstance(verdicts, Sequence) else type(verdicts).__name__
            raise TrainingError(
                f"reward function {self.name!r} must return one score per response: "
                f"{len(responses)} were wanted, it returned {count}"
            )
        return [self._scored(response, verdict) for response, verdict in zip(responses, verdicts, strict=True)]

    def _call(self, *lists: list[Any]) -> Any:
        """Runs the function in a thread of its own, so that one that hangs ends the run instead of holding it."""
        answers: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue()

        def work() -> None:
            try:
                answers.put((self.function(*lists, **self.arguments), None))
            except BaseException as error:
                answers.put((None, error))

        threading.Thread(target=work, daemon=True, name=f"reward-{self.name}").start()
        try:
            verdicts, error = answers.get(timeout=self.timeout_seconds)
        except queue.Empty:
            raise TrainingError(
                f"reward function {self.name!r} did not answer for {len(lists[0])} responses "
                f"within timeout_seconds = {self.timeout_seconds:g}"
            ) from None
        if error is not None:
            place = traceback.extract_tb(error.__traceback__)[-1]
            raise TrainingError(
                f"reward function {self.name!r} raised {type(error).__name__}: {error} "
                f"({place.filename}, line {place.lineno})"
            ) from error
        return verdicts

    def _scored(self, response: Response, verdict: Verdict) -> Scored:
        parts = dict(verdict) if isinstance(verdict, Mapping) else {"score": verdict}
        if ("score" in parts) == ("token_rewards" in parts):
            raise TrainingError(
                f"reward function {self.name!r} must return a mapping with either 'score' or 'token_rewards', whose "
                f"sum is the score; it has {sorted(parts)}"
            )
        token_rewards = parts.pop("token_rewards", None)
        try:
            numbers = {key: math.nan if value is None else float(value) for key, value in parts.items()}
        except (TypeError, ValueError) as error:
            raise TrainingError(
                f"reward function {self.name!r} must return a number, a mapping to numbers or None for each response, "
                f"it returned {verdict!r:.80}"
            ) from error
        if not all(math.isfinite(number) for number in numbers.values()):
            reason = f"{self.name} returned {verdict!r}"
            return Scored(response=response, score=math.nan, state=ScoreState.INFRASTRUCTURE_FAULT, reason=reason)
        unnamed = [key for key in numbers if not re.fullmatch(COMPONENT, key)]
        if unnamed:
            raise TrainingError(
                f"reward function {self.name!r} returned a component {unnamed[0]!r}, which cannot name a metric: use "
                "letters, digits, '_', '.' and '-' only"
            )
        if token_rewards is not None:
            return scored_by_token(response, token_rewards, name=self.name, components=numbers)
        score = numbers.pop("score")
        return Scored(response=response, score=score, components=numbers)


def _callable_with(function: RewardFunction, arguments: Mapping[str, Any], *, name: str) -> RewardFunction:
    """The function itself. Raises ConfigError where it cannot be called as it will be, before anything is removed."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have none to look at
        return function
    try:
        signature.bind([], [], [], **arguments)
    except TypeError as error:
        given = "".join(f", {key}=..." for key in arguments)
        raise ConfigError(
            f"reward function {name!r} is called as function(prompts, responses, metadata{given}), but its signature "
            f"is {signature}: {error}"
        ) from error
    return function


def _metadata(response: Response) -> dict[str, Any]:
    answer = {} if response.prompt.answer is None else {"answer": response.prompt.answer}
    finish: Finish = response.finish
    return {**response.prompt.metadata, **answer, "finish": finish.value, "token_ids": response.token_ids}
