"""The reward source that runs a verifier (verifier.py) in worker processes (workers/)."""

import hashlib
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from proximo.errors import DataError, TrainingError
from proximo.metrics.definitions import COMPONENT
from proximo.metrics.values import MetricValue
from proximo.records import Prompt, Response, Scored, ScoreState
from proximo.rewards.statistics import SourceStatistics
from proximo.rewards.verifier import Grade
from proximo.rewards.workers.frames import encode
from proximo.rewards.workers.loop import PoolLimits
from proximo.rewards.workers.pool import WorkerPool
from proximo.rewards.workers.process import WorkerSpec
from proximo.rewards.workers.work import Done, Failed, TimedOut, Work, WorkResult

MAX_CACHED = 2**16
"""Size of the cache of grades; the least recently used is dropped first."""
CHECK_SECONDS = 600.0
"""Time for checking all rows before a run starts."""
MEMORY_BYTES = 2**32


class VerifierReward:
    """Grades each response by a verifier, in worker processes that are killed if they take too long.

    A grade depends on the answer and the options of the verifier alone, so equal answers are graded once in a run.
    Failures and time-outs depend on the machine as well, so they are not cached.
    """

    concurrent = True

    def __init__(
        self,
        verifier: str,
        *,
        name: str,
        options: Mapping[str, Any] | None = None,
        num_workers: int = 1,
        answer_seconds: float = 10.0,
        step_seconds: float = 600.0,
        attempts: int = 3,
        memory_bytes: int | None = MEMORY_BYTES,
    ) -> None:
        """`grade` is `package.module:Class`; each worker makes one with `options`. The other arguments are documented
        in `VerifierRewardConfig`.

        Raises what the constructor raised (ConfigError, MissingExtraError, SandboxError), and TrainingError if a worker
        died.
        """
        self.name = name
        self.step_seconds = step_seconds
        spec = WorkerSpec(service="verifier", path=verifier, options=options or {}, memory_bytes=memory_bytes)
        limits = PoolLimits(num_workers=num_workers, answer_seconds=answer_seconds, attempts=attempts)
        self._pool = WorkerPool(spec, limits, name=name)
        self._cached: OrderedDict[bytes, Grade] = OrderedDict()
        self._started: dict[bytes, Work] = {}
        self._statistics = SourceStatistics()
        self._counted = (0, 0)
        self._lock = threading.Lock()
        """A reward service calls `score` from several threads, and asynchronous rollouts call `begin` from theirs."""

    def begin(self, response: Response) -> None:
        """Starts grading a finished response; a later call of `score` collects the grade."""
        request = _request(response)
        key = _key(request)
        with self._lock:
            if key not in self._cached and key not in self._started:
                (self._started[key],) = self._pool.submit([request])
            if len(self._started) > MAX_CACHED:  # begun for responses that nobody scores
                del self._started[next(iter(self._started))]

    def score(self, responses: Sequence[Response]) -> list[Scored]:
        """One score per response, within `step_seconds`. A response that is not graded by then has no score.

        Raises DataError for a prompt whose metadata cannot be written as JSON, TrainingError for a component whose name
        cannot be a metric's.
        """
        requests = [_request(response) for response in responses]
        keys = [_key(request) for request in requests]
        with self._lock:
            known = {key: self._cached[key] for key in keys if key in self._cached}
            submitted = self._collect({k: r for k, r in zip(keys, requests, strict=True) if k not in known})
        outcomes = self._pool.wait(tuple(submitted.values()), seconds=self.step_seconds, limit="step_seconds")
        graded = {key: self._grade(outcome) for key, outcome in zip(submitted, outcomes, strict=True)}
        grades = known | graded
        with self._lock:
            self._cache(grades)
            self._count([grades[key] for key in keys], outcomes)
            timed_out = {key for key, outcome in zip(submitted, outcomes, strict=True) if isinstance(outcome, TimedOut)}
            self._statistics.num_timeouts += sum(key in timed_out for key in keys)
        return [_scored(response, grades[key]) for response, key in zip(responses, keys, strict=True)]

    def check_prompts(self, prompts: Sequence[Prompt], origins: Mapping[str, str]) -> None:
        """Raises DataError for a prompt whose answers cannot be graded. `origins` has its file and row by its id."""
        requests = [_encoded({"check": _row(prompt)}, prompt, origins) for prompt in prompts]
        work = self._pool.submit(requests)
        outcomes = self._pool.wait(work, seconds=CHECK_SECONDS, limit="the time for checking rows")
        for prompt, outcome in zip(prompts, outcomes, strict=True):
            origin = _origin(prompt, origins)
            match outcome:
                case Done(value=None):
                    continue
                case Done(value=problem):
                    raise DataError(f"{origin}: reward source {self.name!r}: {problem}")
                case TimedOut(seconds=seconds):
                    raise DataError(f"{origin}: reward source {self.name!r} did not check the row in {seconds:g} s")
                case Failed(reason=reason):
                    raise TrainingError(f"{origin}: reward source {self.name!r} could not check the row: {reason}")

    def statistics(self) -> dict[str, MetricValue]:
        """The metrics of this source since the last call."""
        with self._lock:
            taken, self._statistics = self._statistics, SourceStatistics()
        return taken.metrics(self.name) if taken.num_responses else {}

    def close(self) -> None:
        """Ends the worker processes."""
        self._pool.close()

    def _collect(self, requests: Mapping[bytes, bytes]) -> dict[bytes, Work]:
        """The work for each request, by key: already started by `begin`, or submitted now."""
        fresh = {key: request for key, request in requests.items() if key not in self._started}
        begun = dict(zip(fresh, self._pool.submit(fresh.values()), strict=True))
        return {key: begun[key] if key in begun else self._started.pop(key) for key in requests}

    def _grade(self, outcome: WorkResult) -> Grade:
        match outcome:
            case Done(value=value):
                return self._as_grade(value)
            case TimedOut(seconds=seconds, times=times):
                reason = {
                    0: "idle for longer than a first turn, and had no second turn before step_seconds were over",
                    1: f"not graded within answer_seconds = {seconds:g}, and not again before step_seconds were over",
                    2: f"not graded within answer_seconds = {seconds:g}, twice",
                }[times]
                timeout_grade = self._pool.about
                grade = Grade(score=0.0) if timeout_grade is None else self._as_grade(timeout_grade)
                return replace(grade, state=ScoreState.MODEL_FAULT, reason=reason, by_clock=True)
            case Failed(reason=reason):
                return _fault(reason)

    def _as_grade(self, value: Any) -> Grade:
        try:
            grade = Grade(
                score=float(value["score"]),
                state=ScoreState(value["state"]),
                reason=None if value["reason"] is None else str(value["reason"]),
                components={str(name): float(number) for name, number in value["components"].items()},
                by_clock=bool(value["by_clock"]),
            )
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            return _fault(f"the worker sent no valid grade ({type(error).__name__}: {error})")
        if not all(map(math.isfinite, (grade.score, *grade.components.values()))):
            return _fault("the grade has a number that is not finite")
        unnamed = [name for name in grade.components if not re.fullmatch(COMPONENT, name)]
        if unnamed:
            raise TrainingError(
                f"the verifier of reward source {self.name!r} names a component {unnamed[0]!r}, which cannot name a "
                "metric: use letters, digits, '_', '.' and '-' only"
            )
        return grade

    def _cache(self, grades: Mapping[bytes, Grade]) -> None:
        """Caches grades, except those without a score and those that a clock decided."""
        for key, grade in grades.items():
            if grade.state is not ScoreState.INFRASTRUCTURE_FAULT and not grade.by_clock:
                self._cached[key] = grade
                self._cached.move_to_end(key)
        while len(self._cached) > MAX_CACHED:
            self._cached.popitem(last=False)

    def _count(self, grades: Sequence[Grade], outcomes: Sequence[WorkResult]) -> None:
        counts, pool = self._statistics, self._pool
        states = [grade.state for grade in grades]
        counts.num_responses += len(grades)
        counts.num_cache_hits += len(grades) - len(outcomes)
        counts.num_failures += states.count(ScoreState.INFRASTRUCTURE_FAULT)
        counts.num_model_faults += states.count(ScoreState.MODEL_FAULT)
        counts.seconds += [outcome.seconds for outcome in outcomes if not isinstance(outcome, Failed)]
        retries, restarts = self._counted
        counts.num_retries += pool.num_retries - retries
        counts.num_restarts += pool.num_restarts - restarts
        self._counted = (pool.num_retries, pool.num_restarts)


def _request(response: Response) -> bytes:
    prompt = response.prompt
    message = {
        "grade": {
            "text": response.text,
            "prompt": list(prompt.messages) if prompt.text is None and prompt.messages else prompt.text or "",
            **_row(prompt),
            "finish": response.finish.value,
            "num_tokens": len(response.token_ids),
        }
    }
    return _encoded(message, prompt, {})


def _row(prompt: Prompt) -> dict[str, Any]:
    return {"reference": prompt.answer, "metadata": dict(prompt.metadata)}


def _encoded(message: Mapping[str, Any], prompt: Prompt, origins: Mapping[str, str]) -> bytes:
    try:
        return encode(message)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{_origin(prompt, origins)}: a verifier gets the columns of a row as JSON, and one of them "
            f"cannot be converted ({error}); leave that column out, or write it as text"
        ) from error


def _origin(prompt: Prompt, origins: Mapping[str, str]) -> str:
    return origins.get(prompt.id, f"prompt '{prompt.id}'")


def _key(request: bytes) -> bytes:
    """The key of an answer in the cache: a hash of everything that its grade depends on."""
    return hashlib.blake2b(request, digest_size=16).digest()


def _fault(reason: str) -> Grade:
    return Grade(score=math.nan, state=ScoreState.INFRASTRUCTURE_FAULT, reason=reason)


def _scored(response: Response, grade: Grade) -> Scored:
    return Scored(
        response=response,
        score=grade.score if grade.state.has_score else math.nan,
        components=grade.components,
        state=grade.state,
        reason=grade.reason,
    )
