"""The reward source that grades each response by a verifier (`proximo_verifiers`)."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from proximo.errors import TrainingError, as_own_errors
from proximo.metrics.definitions import COMPONENT
from proximo.metrics.values import MetricValue
from proximo.records import Prompt, Response, Scored
from proximo.rewards.source import grade_metrics
from proximo_verifiers.grader import ANSWER_SECONDS, MEMORY_BYTES, Grader
from proximo_verifiers.verifier import Answer, Grade


class VerifierReward:
    """Scores responses by a `Grader`: in worker processes, and equal answers once in a run."""

    concurrent = True

    def __init__(
        self,
        verifier: str,
        *,
        name: str,
        options: Mapping[str, Any] | None = None,
        num_workers: int = 1,
        answer_seconds: float = ANSWER_SECONDS,
        step_seconds: float = 600.0,
        attempts: int = 3,
        memory_bytes: int | None = MEMORY_BYTES,
    ) -> None:
        """`verifier` is `package.module:Class`; each worker makes one with `options`. The other arguments are those of
        `Grader`.

        Raises what the constructor raised (ConfigError, MissingExtraError, SandboxError), and TrainingError if a worker
        died.
        """
        self.name = name
        with as_own_errors():
            self._grader = Grader(
                verifier,
                options,
                name=name,
                num_workers=num_workers,
                answer_seconds=answer_seconds,
                step_seconds=step_seconds,
                attempts=attempts,
                memory_bytes=memory_bytes,
            )

    def begin(self, response: Response) -> None:
        """Starts grading a finished response; a later call of `score` collects the grade."""
        with as_own_errors():
            self._grader.begin(_answer(response), name=_origin(response.prompt, {}))

    def score(self, responses: Sequence[Response]) -> list[Scored]:
        """One score per response, within `step_seconds`. A response that is not graded by then has no score.

        Raises DataError for a prompt whose metadata cannot be written as JSON, TrainingError for a component whose name
        cannot be a metric's.
        """
        names = [_origin(response.prompt, {}) for response in responses]
        with as_own_errors():
            grades = self._grader.grade([_answer(response) for response in responses], names=names)
        return [self._scored(response, grade) for response, grade in zip(responses, grades, strict=True)]

    def check_prompts(self, prompts: Sequence[Prompt], origins: Mapping[str, str]) -> None:
        """Raises DataError for a prompt whose answers cannot be graded. `origins` has its file and row by its id."""
        rows = [Answer(text="", reference=prompt.answer, metadata=prompt.metadata) for prompt in prompts]
        with as_own_errors():
            self._grader.check_rows(rows, names=[_origin(prompt, origins) for prompt in prompts])

    def statistics(self) -> dict[str, MetricValue]:
        """The metrics of this source since the last call."""
        return grade_metrics(self._grader.take_counts(), self.name)

    def close(self) -> None:
        """Ends the worker processes."""
        self._grader.close()

    def _scored(self, response: Response, grade: Grade) -> Scored:
        unnamed = [name for name in grade.components if not re.fullmatch(COMPONENT, name)]
        if unnamed:
            raise TrainingError(
                f"the verifier of reward source {self.name!r} names a component {unnamed[0]!r}, which cannot name a "
                "metric: use letters, digits, '_', '.' and '-' only"
            )
        return Scored(
            response=response,
            score=grade.score,
            components=grade.components,
            state=grade.state,
            reason=grade.reason,
        )


def _answer(response: Response) -> Answer:
    prompt = response.prompt
    return Answer(
        text=response.text,
        prompt=prompt.messages if prompt.text is None and prompt.messages else prompt.text or "",
        reference=prompt.answer,
        metadata=prompt.metadata,
        finish=response.finish,
        num_tokens=len(response.token_ids),
    )


def _origin(prompt: Prompt, origins: Mapping[str, str]) -> str:
    return origins.get(prompt.id, f"prompt '{prompt.id}'")
