"""The reward source that calls a Python function in its own process, which is restarted if it hangs or crashes."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from proximo.errors import DataError, as_own_errors
from proximo.metrics.values import MetricValue
from proximo.records import Prompt, Response, Scored, ScoreState
from proximo.rewards.calling.binding import WantedColumns
from proximo.rewards.function_results import as_scored, columns_checked, function_inputs
from proximo.rewards.function_service import FUNCTION_SERVICE
from proximo.rewards.statistics import grade_metrics
from proximo_verifiers.grader import GradeCounts
from proximo_verifiers.workers.frames import encode
from proximo_verifiers.workers.loop import START_SECONDS, PoolLimits
from proximo_verifiers.workers.pool import WorkerPool
from proximo_verifiers.workers.process import WorkerSpec
from proximo_verifiers.workers.work import Done, Failed, TimedOut, WorkResult

ATTEMPTS = 3
"""Number of times a batch is tried whose function raised or whose process died."""


class ProcessFunctionReward:
    """Calls a function as `FunctionReward` does, in another process. Its inputs and results cross as JSON.

    The function is the user's own, so its process has the environment variables of the run and no memory limit.
    """

    concurrent = True

    def __init__(
        self, path: str, *, name: str, kwargs: Mapping[str, Any] | None = None, timeout_seconds: float = 600.0
    ) -> None:
        """`path` is `package.module:function`. Raises ConfigError if the process cannot import or call it."""
        self.name = name
        self.timeout_seconds = timeout_seconds
        spec = WorkerSpec(service=FUNCTION_SERVICE, path=path, options=kwargs or {}, whole_environment=True)
        limits = PoolLimits(num_workers=1, answer_seconds=timeout_seconds, attempts=ATTEMPTS)
        with as_own_errors():
            self._pool = WorkerPool(spec, limits, name=name)
        self._statistics = GradeCounts()
        self._columns: tuple[str, ...] = ()
        self._counted = (0, 0)

    def score(self, responses: Sequence[Response]) -> list[Scored]:
        """One score per response. Any other failure of the function leaves the batch without scores.

        Raises TrainingError if the function returns no scores, DataError for a row that cannot be written as JSON.
        """
        if not responses:
            return []
        try:
            request = encode({"call": function_inputs(responses), "columns": self._columns})
        except (TypeError, ValueError) as error:
            raise DataError(
                f"reward function {self.name!r}: with `process: true` rows are sent as JSON, and a column "
                f"cannot be converted ({error}); leave that column out, or write it as text"
            ) from error
        # The worst case: every attempt takes almost the whole timeout, and the process starts anew in between.
        seconds = (ATTEMPTS + 1) * self.timeout_seconds + START_SECONDS
        with as_own_errors():
            (outcome,) = self._pool.wait(self._pool.submit([request]), seconds=seconds, limit="its limits")
        scored = self._scored(responses, outcome)
        self._count(scored, outcome)
        return scored

    def check_prompts(self, prompts: Sequence[Prompt], origins: Mapping[str, str]) -> None:
        """Raises DataError where the function cannot be bound to a prompt, as `FunctionReward.check_prompts` does."""
        wanted = WantedColumns(**self._pool.about)
        self._columns = columns_checked(prompts, origins, wanted, before=self._columns, name=self.name)

    def statistics(self) -> dict[str, MetricValue]:
        """The metrics of this source since the last call. Its seconds are those of whole batches."""
        taken, self._statistics = self._statistics, GradeCounts()
        return grade_metrics(taken, self.name)

    def close(self) -> None:
        """Ends the process of the function."""
        self._pool.close()

    def _scored(self, responses: Sequence[Response], outcome: WorkResult) -> list[Scored]:
        match outcome:
            case Done(value=value):
                return as_scored(responses, value, name=self.name)
            case TimedOut(times=times):
                often = "twice" if times > 1 else "and not again before its limits were over"
                reason = f"{self.name} did not answer within timeout_seconds = {self.timeout_seconds:g}, {often}"
            case Failed():
                reason = f"{self.name}: {outcome.reason}"
        state = ScoreState.INFRASTRUCTURE_FAULT
        return [Scored(response=response, score=math.nan, state=state, reason=reason) for response in responses]

    def _count(self, scored: Sequence[Scored], outcome: WorkResult) -> None:
        counts = self._statistics
        counts.num_responses += len(scored)
        if isinstance(outcome, Done | TimedOut):
            counts.seconds.append(outcome.seconds)
        counts.num_timeouts += len(scored) * isinstance(outcome, TimedOut)
        counts.num_failures += sum(item.state is ScoreState.INFRASTRUCTURE_FAULT for item in scored)
        retries, restarts = self._counted
        self._counted = (self._pool.num_retries, self._pool.num_restarts)
        counts.num_retries += self._counted[0] - retries
        counts.num_restarts += self._counted[1] - restarts
