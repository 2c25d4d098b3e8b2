"""Grades answers by a verifier in worker processes, each answer once."""

import hashlib
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

from proximo_verifiers.errors import ConfigError, DataError, WorkersError
from proximo_verifiers.verifier import Answer, Grade, ScoreState
from proximo_verifiers.workers.frames import encode
from proximo_verifiers.workers.loop import PoolLimits
from proximo_verifiers.workers.pool import WorkerPool
from proximo_verifiers.workers.process import WorkerSpec
from proximo_verifiers.workers.work import Done, Failed, TimedOut, Work, WorkResult

MAX_CACHED = 2**16
"""Size of the cache of grades; the least recently used is dropped first."""
CHECK_SECONDS = 600.0
"""Time for checking the rows of one call."""
ANSWER_SECONDS = 10.0
MEMORY_BYTES = 2**32


@dataclass(kw_only=True)
class GradeCounts:
    """What happened to the answers since the counts were last taken."""

    num_responses: int = 0
    num_cache_hits: int = 0
    """Answers that had an earlier grade."""
    num_timeouts: int = 0
    num_failures: int = 0
    """Answers without a score, through no fault of theirs."""
    num_model_faults: int = 0
    """Answers with a low score because they are at fault, time-outs included."""
    num_retries: int = 0
    num_restarts: int = 0
    seconds: list[float] = field(default_factory=list)
    """Time of each graded answer; the limit for an answer that timed out."""


class Grader:
    """Grades answers by a verifier, in worker processes that are killed if they take too long.

    A grade depends on the answer and the options of the verifier alone, so equal answers are graded once. Failures and
    time-outs depend on the machine as well, so they are not cached. May be used from several threads. The workers end
    with `close`, at the end of a `with` block, or with this process.
    """

    def __init__(
        self,
        verifier: type | str,
        options: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
        num_workers: int | None = None,
        answer_seconds: float | None = None,
        step_seconds: float = 600.0,
        attempts: int = 3,
        memory_bytes: int | None = MEMORY_BYTES,
    ) -> None:
        """Starts the workers and waits until the first is ready.

        `verifier` is a class of a module that workers can import, or its path `package.module:Class`; each worker makes
        one with `options`. `name` is used in messages: by default the name of the class. `num_workers`: by default one
        for each core. `answer_seconds` bounds the wall-clock time of one answer, by default what the class sets in
        `answer_seconds`, or 10; a class that sets it is told the limit as an option. `step_seconds` bounds a call of
        `grade`. An answer whose worker died or whose verifier failed is tried `attempts` times. `memory_bytes` bounds
        the address space of a worker; None for no limit.

        Raises what making the verifier raised (ConfigError, MissingExtraError, SandboxError), and WorkersError if a
        worker died.
        """
        own_limit = getattr(verifier, "answer_seconds", None)
        limit = answer_seconds or own_limit or ANSWER_SECONDS
        told = {} if own_limit is None else {"answer_seconds": limit}
        path = verifier if isinstance(verifier, str) else _path_of(verifier)
        self.name = name or path.rpartition(":")[2]
        self.step_seconds = step_seconds
        spec = WorkerSpec(path=path, options={**told, **(options or {})}, memory_bytes=memory_bytes)
        limits = PoolLimits(num_workers=num_workers or num_cores(), answer_seconds=limit, attempts=attempts)
        self._pool = WorkerPool(spec, limits, name=self.name)
        self._cached: OrderedDict[bytes, Grade] = OrderedDict()
        self._started: dict[bytes, Work] = {}
        self._fit_rows: set[bytes] = set()
        self._counts = GradeCounts()
        self._counted = (0, 0)
        self._lock = threading.Lock()

    def begin(self, answer: Answer, *, name: str = "answer 0") -> None:
        """Starts grading an answer; a later call of `grade` collects the grade."""
        request = _request(answer, name)
        key = _key(request)
        with self._lock:
            if key not in self._cached and key not in self._started:
                (self._started[key],) = self._pool.submit([request])
            if len(self._started) > MAX_CACHED:  # begun for answers that nobody grades
                del self._started[next(iter(self._started))]

    def grade(self, answers: Sequence[Answer], *, names: Sequence[str] = ()) -> list[Grade]:
        """One grade per answer, within `step_seconds`. An answer that is not graded by then has no score.

        Raises DataError for an answer whose metadata cannot be written as JSON, by its name in `names`.
        """
        requests = [_request(answer, name) for answer, name in zip(answers, _named(answers, names), strict=True)]
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
            self._counts.num_timeouts += sum(key in timed_out for key in keys)
        return [grades[key] for key in keys]

    def check_rows(self, rows: Sequence[Answer], *, names: Sequence[str] = ()) -> None:
        """Raises DataError for the first row whose answers cannot be graded, by its name in `names`.

        Of each answer only `reference` and `metadata` are read. A row is not checked again.
        """
        waiting: dict[bytes, tuple[str, bytes]] = {}
        for answer, name in zip(rows, _named(rows, names), strict=True):
            request = _encoded({"check": _row(answer)}, name)
            key = _key(request)
            if key not in self._fit_rows:
                waiting.setdefault(key, (name, request))
        work = self._pool.submit([request for _, request in waiting.values()])
        outcomes = self._pool.wait(work, seconds=CHECK_SECONDS, limit="the time for checking rows")
        for (name, _), outcome in zip(waiting.values(), outcomes, strict=True):
            where = f"{name}: reward source {self.name!r}"
            match outcome:
                case Done(value=None):
                    continue
                case Done(value=problem):
                    raise DataError(f"{where}: {problem}")
                case TimedOut(seconds=seconds):
                    raise DataError(f"{where} did not check the row in {seconds:g} s")
                case Failed(reason=reason):
                    raise WorkersError(f"{where} could not check the row: {reason}")
        if len(self._fit_rows) > MAX_CACHED:
            self._fit_rows.clear()
        self._fit_rows.update(waiting)

    def take_counts(self) -> GradeCounts:
        """The counts since the last call."""
        with self._lock:
            taken, self._counts = self._counts, GradeCounts()
        return taken

    def close(self) -> None:
        """Ends the worker processes."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def _collect(self, requests: Mapping[bytes, bytes]) -> dict[bytes, Work]:
        """The work for each request, by key: already started by `begin`, or submitted now."""
        fresh = {key: request for key, request in requests.items() if key not in self._started}
        begun = dict(zip(fresh, self._pool.submit(fresh.values()), strict=True))
        return {key: begun[key] if key in begun else self._started.pop(key) for key in requests}

    def _grade(self, outcome: WorkResult) -> Grade:
        match outcome:
            case Done(value=value):
                return _as_grade(value)
            case TimedOut(seconds=seconds, times=times):
                reason = {
                    0: "idle for longer than a first turn, and had no second turn before step_seconds were over",
                    1: f"not graded within answer_seconds = {seconds:g}, and not again before step_seconds were over",
                    2: f"not graded within answer_seconds = {seconds:g}, twice",
                }[times]
                timeout_grade = self._pool.about
                grade = Grade(score=0.0) if timeout_grade is None else _as_grade(timeout_grade)
                return replace(grade, state=ScoreState.MODEL_FAULT, reason=reason, by_clock=True)
            case Failed(reason=reason):
                return _fault(reason)

    def _cache(self, grades: Mapping[bytes, Grade]) -> None:
        """Caches grades, except those without a score and those that a clock decided."""
        for key, grade in grades.items():
            if grade.state is not ScoreState.INFRASTRUCTURE_FAULT and not grade.by_clock:
                self._cached[key] = grade
                self._cached.move_to_end(key)
        while len(self._cached) > MAX_CACHED:
            self._cached.popitem(last=False)

    def _count(self, grades: Sequence[Grade], outcomes: Sequence[WorkResult]) -> None:
        counts, pool = self._counts, self._pool
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


def num_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _path_of(verifier: type) -> str:
    """The import path of a class. Raises ConfigError for one that a worker cannot import."""
    if verifier.__module__ == "__main__" or "<locals>" in verifier.__qualname__:
        raise ConfigError(
            f"workers cannot import the class {verifier.__qualname__}, which is defined in "
            f"{'a function' if '<locals>' in verifier.__qualname__ else 'a script or notebook'}: "
            "write it into a module of its own and import it from there"
        )
    return f"{verifier.__module__}:{verifier.__qualname__}"


def _named(answers: Sequence[Answer], names: Sequence[str]) -> Sequence[str]:
    return names or [f"answer {index}" for index in range(len(answers))]


def _request(answer: Answer, name: str) -> bytes:
    message = {
        "grade": {
            "text": answer.text,
            "prompt": answer.prompt if isinstance(answer.prompt, str) else list(answer.prompt),
            **_row(answer),
            "finish": answer.finish.value,
            "num_tokens": answer.num_tokens,
        }
    }
    return _encoded(message, name)


def _row(answer: Answer) -> dict[str, Any]:
    return {"reference": answer.reference, "metadata": dict(answer.metadata)}


def _encoded(message: Mapping[str, Any], name: str) -> bytes:
    try:
        return encode(message)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{name}: a verifier gets the columns of a row as JSON, and one of them "
            f"cannot be converted ({error}); leave that column out, or write it as text"
        ) from error


def _key(request: bytes) -> bytes:
    """The key of an answer in the cache: a hash of everything that its grade depends on."""
    return hashlib.blake2b(request, digest_size=16).digest()


def _as_grade(value: Any) -> Grade:
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
    return grade if grade.state.has_score else replace(grade, score=math.nan)


def _fault(reason: str) -> Grade:
    return Grade(score=math.nan, state=ScoreState.INFRASTRUCTURE_FAULT, reason=reason)
