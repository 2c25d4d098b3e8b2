"""Scores from a Python function in a process of its own: one that hangs or crashes is ended, and tried again."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from proximo.errors import DataError
from proximo.metrics.values import MetricValue
from proximo.records import Response, Scored, ScoreState
from proximo.rewards.function_results import as_scored, questions
from proximo.rewards.statistics import SourceStatistics
from proximo.rewards.workers.frames import encode
from proximo.rewards.workers.loop import START_SECONDS, PoolLimits
from proximo.rewards.workers.outcomes import Done, Failed, Outcome, TimedOut
from proximo.rewards.workers.pool import WorkerPool
from proximo.rewards.workers.process import Job

ATTEMPTS = 3
"""How often a batch is tried whose function raised, or whose process died."""


class ProcessFunctionReward:
    """As `FunctionReward`, with everything as JSON, so that token ids are a list and rows hold nothing but JSON.

    The function is the user's own: its process has the environment variables of the run and no limit on memory.
    """

    concurrent = True

    def __init__(
        self, path: str, *, name: str, kwargs: Mapping[str, Any] | None = None, timeout_seconds: float = 600.0
    ) -> None:
        """`path` is `package.module:function`. Raises ConfigError where the process cannot import or call it."""
        self.name = name
        self.timeout_seconds = timeout_seconds
        job = Job(service="function", path=path, options=kwargs or {}, whole_environment=True)
        limits = PoolLimits(num_workers=1, answer_seconds=timeout_seconds, attempts=ATTEMPTS)
        self._pool = WorkerPool(job, limits, name=name)
        self._statistics = SourceStatistics()
        self._counted = (0, 0)

    def score(self, responses: Sequence[Response]) -> list[Scored]:
        """Raises TrainingError where the function returns something else than scores; what else befalls it costs the
        batch its scores."""
        if not responses:
            return []
        try:
            request = encode({"call": questions(responses)})
        except (TypeError, ValueError) as error:
            raise DataError(
                f"reward function {self.name!r}: with `process: true` the rows' columns cross as JSON, which cannot "
                f"say one of them ({error}); leave that column out, or write it as text"
            ) from error
        # Two time-outs, or a crash just before each of them, and the starts in between.
        seconds = (ATTEMPTS + 1) * self.timeout_seconds + START_SECONDS
        (outcome,) = self._pool.wait(self._pool.submit([request]), seconds=seconds, limit="its limits")
        scored = self._scored(responses, outcome)
        self._count(scored, outcome)
        return scored

    def statistics(self) -> dict[str, MetricValue]:
        """The metrics of this source since they were last asked for; its seconds are those of whole batches."""
        taken, self._statistics = self._statistics, SourceStatistics()
        return taken.metrics(self.name) if taken.num_responses else {}

    def close(self) -> None:
        """End the process."""
        self._pool.close()

    def _scored(self, responses: Sequence[Response], outcome: Outcome) -> list[Scored]:
        match outcome:
            case Done(value=value):
                return as_scored(responses, value, name=self.name)
            case TimedOut(times=times):
                often = "twice" if times > 1 else "and not again before its limits were over"
                reason = f"{self.name} did not answer within timeout_seconds = {self.timeout_seconds:g}, {often}"
            case Failed():
                reason = f"{self.name}: {outcome.reason}"
        state = ScoreState.INFRASTRUCTURE_FAULT
        return [Scored(response=each, score=math.nan, state=state, reason=reason) for each in responses]

    def _count(self, scored: Sequence[Scored], outcome: Outcome) -> None:
        counts = self._statistics
        counts.num_responses += len(scored)
        if isinstance(outcome, Done | TimedOut):
            counts.seconds.append(outcome.seconds)
        counts.num_timeouts += len(scored) * isinstance(outcome, TimedOut)
        counts.num_failures += sum(not each.valid for each in scored)
        retries, restarts = self._counted
        self._counted = (self._pool.num_retries, self._pool.num_restarts)
        counts.num_retries += self._counted[0] - retries
        counts.num_restarts += self._counted[1] - restarts
