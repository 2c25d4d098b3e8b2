"""Calls user-defined code: turns its exceptions into errors that name it, and checks what a reward source returns."""

import math
import pickle
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from proximo.distributed.world import current
from proximo.errors import ProximoError, TrainingError, disk_refused, memory_ran_out
from proximo.records import Response, Scored, ScoreState
from proximo.rewards.source import RewardSource, is_shared, score_on_ranks, scored_once
from proximo.rewards.token_rewards import as_number, is_list
from proximo.user_code import error_text, where_raised


def checked_scores(source: RewardSource, responses: Sequence[Response]) -> list[Scored]:
    """Scores of these responses as Python numbers. Every rank calls it and gets the same scores.

    Raises TrainingError if a user-defined source raises, or does not return one `Scored` per response, in order.
    """
    what = f"reward source {source.name!r}"
    if type(source).__module__.startswith("proximo."):
        return score_on_ranks(source, responses)
    if is_shared(source):
        return _asked(source, responses, what)
    return scored_once(lambda: _asked(source, responses, what), responses, name=source.name)


def _asked(source: RewardSource, responses: Sequence[Response], what: str) -> list[Scored]:
    with user_errors_named(what, source.score):
        scored = source.score(responses)
    if not is_list(scored) or len(scored) != len(responses):
        came = len(scored) if is_list(scored) else f"a {type(scored).__name__}"
        raise TrainingError(
            f"{what} must return a list with one Scored for each of {len(responses)} responses, it returned {came}"
        )
    return [_checked(each, response, what) for each, response in zip(scored, responses, strict=True)]


def _checked(each: Any, response: Response, what: str) -> Scored:
    if not isinstance(each, Scored):
        raise TrainingError(
            f"{what} must return Scored(response=response, score=...) for each response, it returned {each!r:.60}; a "
            "plain function may return numbers"
        )
    if _identity(each.response) != _identity(response):
        raise TrainingError(
            f"{what} returned its scores in another order than the responses: prompt {response.prompt.id!r}, sample "
            f"{response.sample_index}, got prompt {each.response.prompt.id!r}, sample {each.response.sample_index}"
        )
    try:
        number = as_number(each.score)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TrainingError(f"{what} must give each response a number as its score, got {each.score!r:.60}") from error
    if each.valid and not math.isfinite(number):
        reason = each.reason or f"{what} gave {each.score}"
        return replace(each, score=math.nan, state=ScoreState.INFRASTRUCTURE_FAULT, reason=reason)
    return each if type(each.score) is float else replace(each, score=number)


def _identity(response: Response) -> tuple[str, int, tuple[int, ...]]:
    return response.prompt.id, response.sample_index, tuple(response.token_ids)


@contextmanager
def user_errors_named(what: str, function: Any) -> Generator[None]:
    """Inside, an exception of user-defined code becomes a TrainingError that names the code and the line.

    Proximo's own errors, out-of-memory errors and disk errors pass through unchanged.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, ProximoError) or memory_ran_out(error) or disk_refused(error):
            raise
        raise TrainingError(f"{what} raised {error_text(error)} ({where_raised(error, function)})") from error


def call_on_step(on_step: Callable[[int, Mapping[str, float]], Any], number: int, metrics: Mapping[str, float]) -> None:
    """Call `on_step` on rank 0. Its exceptions may be meant to end the loop, so they are raised on every rank, with a
    note of their origin."""

    def run() -> BaseException | None:
        try:
            on_step(number, metrics)
        except BaseException as error:
            error.add_note(
                f"raised by on_step after step {number}, which is done; train continues with step {number + 1}"
            )
            if not _can_be_sent(error):
                raise
            return error
        return None

    error = current().once(run, what="on_step")
    if error is not None:
        raise error


def _can_be_sent(error: BaseException) -> bool:
    try:
        pickle.dumps(error)
    except Exception:  # a user's exception may hold anything
        return False
    return True
