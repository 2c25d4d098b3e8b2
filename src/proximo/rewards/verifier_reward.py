"""Scores from a judge that lives in worker processes (rewards/verdicts.py). Not the workers: those are in workers/."""

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
from proximo.rewards.verdicts import Verdict
from proximo.rewards.workers.frames import encode
from proximo.rewards.workers.loop import PoolLimits
from proximo.rewards.workers.outcomes import Done, Failed, Outcome, TimedOut, Work
from proximo.rewards.workers.pool import WorkerPool
from proximo.rewards.workers.process import Job

MAX_REMEMBERED = 2**16
"""Verdicts that are kept; the one that was not asked for longest goes first."""
CHECK_SECONDS = 600.0
"""For all rows together, before a run starts."""
MEMORY_BYTES = 2**32


class JudgedReward:
    """Asks a judge about each response, in processes that are killed when they take too long.

    A verdict depends on the answer and the judge's options alone, so each answer is judged once in a run. What could
    not be judged, or not in its time, is not remembered: that depends on the machine as well.
    """

    concurrent = True

    def __init__(
        self,
        judge: str,
        *,
        name: str,
        options: Mapping[str, Any] | None = None,
        num_workers: int = 1,
        answer_seconds: float = 10.0,
        step_seconds: float = 600.0,
        attempts: int = 3,
        memory_bytes: int | None = MEMORY_BYTES,
    ) -> None:
        """`judge` is `package.module:Class`, made in each worker with `options`; the other arguments are those of
        `JudgedRewardConfig`.

        Raises what making it raised: ConfigError, MissingExtraError, SandboxError; TrainingError where a worker died.
        """
        self.name = name
        self.step_seconds = step_seconds
        job = Job(service="judge", path=judge, options=options or {}, memory_bytes=memory_bytes)
        limits = PoolLimits(num_workers=num_workers, answer_seconds=answer_seconds, attempts=attempts)
        self._pool = WorkerPool(job, limits, name=name)
        self._remembered: OrderedDict[bytes, Verdict] = OrderedDict()
        self._begun: dict[bytes, Work] = {}
        self._statistics = SourceStatistics()
        self._counted = (0, 0)
        self._lock = threading.Lock()
        """A service asks from several threads."""

    def begin(self, response: Response) -> None:
        """Start on a response that has ended; `score` collects it."""
        request = _request(response)
        key = _key(request)
        with self._lock:
            if key not in self._remembered and key not in self._begun:
                (self._begun[key],) = self._pool.submit([request])

    def score(self, responses: Sequence[Response]) -> list[Scored]:
        """One verdict per response, after at most `step_seconds`; what is not judged then has no score.

        Raises DataError for a prompt whose metadata JSON cannot say, TrainingError for a judge that names a component
        as no metric can be named.
        """
        requests = [_request(response) for response in responses]
        keys = [_key(request) for request in requests]
        with self._lock:
            known = {key: self._remembered[key] for key in keys if key in self._remembered}
            asked = self._collect({k: r for k, r in zip(keys, requests, strict=True) if k not in known})
        outcomes = self._pool.wait(tuple(asked.values()), seconds=self.step_seconds, limit="step_seconds")
        judged = {key: self._verdict(outcome) for key, outcome in zip(asked, outcomes, strict=True)}
        verdicts = known | judged
        with self._lock:
            self._remember(verdicts)
            self._forget_what_nobody_asked_for()
            self._count([verdicts[key] for key in keys], outcomes)
            timed_out = {key for key, outcome in zip(asked, outcomes, strict=True) if isinstance(outcome, TimedOut)}
            self._statistics.num_timeouts += sum(key in timed_out for key in keys)
        return [_scored(response, verdicts[key]) for response, key in zip(responses, keys, strict=True)]

    def check_prompts(self, prompts: Sequence[Prompt], origins: Mapping[str, str]) -> None:
        """Raises DataError, with the row's origin by the prompt's id, for a prompt no answer to which can be judged."""
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
        """The metrics of this source since they were last asked for."""
        with self._lock:
            taken, self._statistics = self._statistics, SourceStatistics()
        return taken.metrics(self.name) if taken.num_responses else {}

    def close(self) -> None:
        """End the workers."""
        self._pool.close()

    def _collect(self, requests: Mapping[bytes, bytes]) -> dict[bytes, Work]:
        """Of each key the work that was begun, or that begins now."""
        fresh = {key: request for key, request in requests.items() if key not in self._begun}
        begun = dict(zip(fresh, self._pool.submit(fresh.values()), strict=True))
        return {key: begun[key] if key in begun else self._begun.pop(key) for key in requests}

    def _verdict(self, outcome: Outcome) -> Verdict:
        match outcome:
            case Done(value=value):
                return self._as_verdict(value)
            case TimedOut(seconds=seconds, times=times):
                reason = {
                    0: "idle for longer than a first turn, and not asked again before step_seconds were over",
                    1: f"not judged within answer_seconds = {seconds:g}, and not again before step_seconds were over",
                    2: f"not judged within answer_seconds = {seconds:g}, twice",
                }[times]
                given = self._pool.about
                verdict = Verdict(score=0.0) if given is None else self._as_verdict(given)
                return replace(verdict, state=ScoreState.MODEL_FAULT, reason=reason, by_clock=True)
            case Failed(reason=reason):
                return _fault(reason)

    def _as_verdict(self, value: Any) -> Verdict:
        try:
            verdict = Verdict(
                score=float(value["score"]),
                state=ScoreState(value["state"]),
                reason=None if value["reason"] is None else str(value["reason"]),
                components={str(name): float(number) for name, number in value["components"].items()},
                by_clock=bool(value["by_clock"]),
            )
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            return _fault(f"the worker's verdict is none ({type(error).__name__}: {error})")
        if not all(map(math.isfinite, (verdict.score, *verdict.components.values()))):
            return _fault("the worker's verdict has a number that is not finite")
        unnamed = [name for name in verdict.components if not re.fullmatch(COMPONENT, name)]
        if unnamed:
            raise TrainingError(
                f"the judge of reward source {self.name!r} names a component {unnamed[0]!r}, which cannot name a "
                "metric: use letters, digits, '_', '.' and '-' only"
            )
        return verdict

    def _remember(self, verdicts: Mapping[bytes, Verdict]) -> None:
        """But for what has no score, or was decided by a clock."""
        for key, verdict in verdicts.items():
            if verdict.state is not ScoreState.INFRASTRUCTURE_FAULT and not verdict.by_clock:
                self._remembered[key] = verdict
                self._remembered.move_to_end(key)
        while len(self._remembered) > MAX_REMEMBERED:
            self._remembered.popitem(last=False)

    def _forget_what_nobody_asked_for(self) -> None:
        """Of what was begun, the verdicts are worth keeping; the rest may still be asked for."""
        ended = {key: work for key, work in self._begun.items() if work.outcome is not None}
        for key in ended:
            del self._begun[key]
        judged = {key: self._verdict(work.outcome) for key, work in ended.items() if work.outcome is not None}
        self._remember(judged)

    def _count(self, verdicts: Sequence[Verdict], outcomes: Sequence[Outcome]) -> None:
        counts, pool = self._statistics, self._pool
        states = [verdict.state for verdict in verdicts]
        counts.num_responses += len(verdicts)
        counts.num_cache_hits += len(verdicts) - len(outcomes)
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
        "judge": {
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
            f"{_origin(prompt, origins)}: a judge is handed the row's columns as JSON, which cannot say one of them "
            f"({error}); leave that column out, or write it as text"
        ) from error


def _origin(prompt: Prompt, origins: Mapping[str, str]) -> str:
    return origins.get(prompt.id, f"prompt '{prompt.id}'")


def _key(request: bytes) -> bytes:
    """Of everything that the verdict depends on."""
    return hashlib.blake2b(request, digest_size=16).digest()


def _fault(reason: str) -> Verdict:
    return Verdict(score=math.nan, state=ScoreState.INFRASTRUCTURE_FAULT, reason=reason)


def _scored(response: Response, verdict: Verdict) -> Scored:
    return Scored(
        response=response,
        score=verdict.score,
        components=verdict.components,
        state=verdict.state,
        reason=verdict.reason,
    )
