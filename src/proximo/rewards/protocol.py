"""What a reward service is asked and what it answers: JSON, versioned, checked on both sides. Not how it travels.

Text and token ids of responses travel, and of their prompts everything but the token ids. Log-probs do not.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from proximo.enums import Finish, ScoreState
from proximo.errors import DataError
from proximo.metrics.definitions import COMPONENT
from proximo.records import Prompt, Response, Scored

SCHEMA = "proximo.reward/1"
"""Changes with the format. Who reads another one says so instead of guessing."""
SCORE_PATH = "/v1/score"
CHECK_PATH = "/v1/check"
"""Where prompts are asked about before there are responses. A service need not have it."""
SECONDS_HEADER = "Proximo-Seconds"
"""Of a request: for how long its answer is waited for."""
MAX_REASON = 500
"""Characters of a reason that are kept."""


class WireError(ValueError):
    """A body is not what was agreed on."""


class OtherSchemaError(WireError):
    """A body is of another version."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Prompt(_Part):
    id: str
    text: str | None
    messages: list[dict[str, Any]] | None
    answer: str | None
    metadata: dict[str, Any]


class _Response(_Part):
    prompt: _Prompt
    sample_index: int
    text: str
    token_ids: list[int]
    finish: Literal["eos", "stop", "length", "aborted"]


class _Request(_Part):
    format: str
    responses: list[_Response]


class _Row(_Part):
    origin: str
    answer: str | None
    metadata: dict[str, Any]


class _Check(_Part):
    format: str
    rows: list[_Row]


class _Checked(_Part):
    format: str
    problem: str | None


class _Grade(_Part):
    id: int
    state: Literal["scored", "model_fault", "infrastructure_fault"]
    score: float | None = Field(allow_inf_nan=False)
    reason: str | None = None
    components: dict[str, float] = Field(default_factory=dict)
    token_rewards: list[float] | None = None


class _Reply(_Part):
    format: str
    grades: list[_Grade]


Body = TypeVar("Body", _Request, _Reply, _Check, _Checked)


def request_body(responses: Sequence[Response]) -> bytes:
    """The request for grades on `responses`. Raises DataError for a prompt whose metadata JSON cannot say."""
    asked = [
        _Response(
            prompt=_Prompt(
                id=response.prompt.id,
                text=response.prompt.text,
                messages=None if response.prompt.messages is None else [dict(m) for m in response.prompt.messages],
                answer=response.prompt.answer,
                metadata=dict(response.prompt.metadata),
            ),
            sample_index=response.sample_index,
            text=_sayable(response.text),
            token_ids=list(response.token_ids),
            finish=response.finish.value,
        )
        for response in responses
    ]
    return _encoded(_Request(format=SCHEMA, responses=asked), {response.prompt.id for response in responses})


def read_request(body: bytes) -> list[Response]:
    """The responses that are asked about. Raises WireError."""
    return [
        Response(
            prompt=Prompt(
                id=asked.prompt.id,
                token_ids=(),
                text=asked.prompt.text,
                messages=None if asked.prompt.messages is None else tuple(asked.prompt.messages),
                answer=asked.prompt.answer,
                metadata=asked.prompt.metadata,
            ),
            sample_index=asked.sample_index,
            token_ids=tuple(asked.token_ids),
            logprobs=torch.zeros(len(asked.token_ids)),
            response_mask=torch.ones(len(asked.token_ids), dtype=torch.bool),
            finish=Finish(asked.finish),
            policy_version=0,
            text=asked.text,
        )
        for asked in _read(_Request, body).responses
    ]


def check_body(prompts: Sequence[Prompt], origins: Mapping[str, str]) -> bytes:
    """The question whether answers to these prompts could be graded; `origins` says by the prompt's id where it stands.

    Raises DataError for a prompt whose metadata JSON cannot say.
    """
    named = [(origins.get(prompt.id, f"prompt '{prompt.id}'"), prompt) for prompt in prompts]
    rows = [_Row(origin=origin, answer=each.answer, metadata=dict(each.metadata)) for origin, each in named]
    return _encoded(_Check(format=SCHEMA, rows=rows), {origin for origin, _ in named})


def read_check(body: bytes) -> tuple[list[Prompt], dict[str, str]]:
    """The prompts that are asked about, and where they stand by their ids. Raises WireError."""
    rows = _read(_Check, body).rows
    prompts = [
        Prompt(id=str(index), token_ids=(), text="", answer=row.answer, metadata=row.metadata)
        for index, row in enumerate(rows)
    ]
    return prompts, {str(index): row.origin for index, row in enumerate(rows)}


def checked_body(problem: str | None) -> bytes:
    """The answer: what is wrong with the first row that no answer could be graded to, or None."""
    return _Checked(format=SCHEMA, problem=None if problem is None else _sayable(problem)).model_dump_json().encode()


def read_checked(body: bytes) -> str | None:
    """What is wrong, or None. Raises WireError."""
    problem = _read(_Checked, body).problem
    return None if problem is None else problem[:MAX_REASON]


def reply_body(scored: Sequence[Scored]) -> bytes:
    """The answer with these grades. A number that is not finite is left out of the components."""
    grades = [
        _Grade(
            id=index,
            state=each.state.value,
            score=None if each.state is ScoreState.INFRASTRUCTURE_FAULT else each.score,
            reason=None if each.reason is None else _sayable(each.reason),
            components={name: float(value) for name, value in each.components.items() if math.isfinite(value)},
            token_rewards=None if each.token_rewards is None else list(each.token_rewards),
        )
        for index, each in enumerate(scored)
    ]
    return _Reply(format=SCHEMA, grades=grades).model_dump_json().encode()


def read_reply(body: bytes, responses: Sequence[Response]) -> list[Scored]:
    """The grades on `responses`, in their order. Raises WireError for anything but one good grade on each."""
    grades = _read(_Reply, body).grades
    if [grade.id for grade in grades] != list(range(len(responses))):
        raise WireError(f"grades on {len(responses)} responses were asked for, with ids from 0; not these came")
    return [_scored(grade, response) for grade, response in zip(grades, responses, strict=True)]


def _sayable(text: str) -> str:
    """Half of a surrogate pair, which JSON on its way cannot say, becomes a question mark."""
    return text.encode(errors="replace").decode()


def _encoded(body: BaseModel, names: Iterable[str]) -> bytes:
    try:
        return body.model_dump_json().encode()
    except ValueError as error:
        raise DataError(
            f"a prompt cannot travel to the reward service as JSON (among them {', '.join(sorted(names)[:3])}): "
            f"{error}; leave the column out that is no text, number, list or mapping"
        ) from error


def _read(schema: type[Body], body: bytes) -> Body:
    try:
        found = schema.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        if (version := _version(body)) not in (None, SCHEMA):
            raise OtherSchemaError(f"its format is {version!r:.60}, and {SCHEMA!r} is spoken here") from None
        place = ".".join(map(str, first["loc"]))
        raise WireError(f"{f'{place}: ' if place else ''}{first['msg']:.200}") from None
    if found.format != SCHEMA:
        raise OtherSchemaError(f"its format is {found.format!r:.60}, and {SCHEMA!r} is spoken here")
    return found


class _Version(BaseModel):
    """The one key that every version has."""

    format: str


def _version(body: bytes) -> str | None:
    try:
        return _Version.model_validate_json(body).format
    except ValidationError:
        return None


def _scored(grade: _Grade, response: Response) -> Scored:
    state = ScoreState(grade.state)
    if (grade.score is None) != (state is ScoreState.INFRASTRUCTURE_FAULT):
        raise WireError(f"grade {grade.id} is {state.value} with score {grade.score}")
    if not all(map(math.isfinite, grade.components.values())):
        raise WireError(f"grade {grade.id} has a component that is not finite")
    unnamed = [name for name in grade.components if not re.fullmatch(COMPONENT, name)]
    if unnamed:
        raise WireError(f"grade {grade.id} has a component {unnamed[0]!r:.60}, which cannot name a metric")
    return Scored(
        response=response,
        score=math.nan if grade.score is None else grade.score,
        state=state,
        components=grade.components,
        reason=None if grade.reason is None else grade.reason[:MAX_REASON],
        token_rewards=_token_rewards(grade, response),
    )


def _token_rewards(grade: _Grade, response: Response) -> tuple[float, ...] | None:
    rewards = grade.token_rewards
    if rewards is None:
        return None
    if len(rewards) != len(response.token_ids) or not all(map(math.isfinite, rewards)):
        raise WireError(f"grade {grade.id} must have a finite reward for each of {len(response.token_ids)} tokens")
    return tuple(rewards)
