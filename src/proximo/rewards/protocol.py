"""The JSON messages between a reward service and its clients. Both sides validate them.

A request has everything of a response but its log-probs, and everything of its prompt but the token ids.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from proximo.errors import DataError
from proximo.message_text import count_of
from proximo.metrics.definitions import COMPONENT
from proximo.records import Prompt, Response, Scored
from proximo_verifiers.verifier import Finish, ScoreState

SCHEMA = "proximo.reward/1"
"""The version of the format, which goes up when a release has other messages than the release before. A message of
another version is refused."""
SCORE_PATH = "/v1/score"
CHECK_PATH = "/v1/check"
"""Path of the check of rows before a run. A service need not have it."""
SECONDS_HEADER = "Proximo-Seconds"
"""Request header: for how many seconds the client waits for the reply."""
MAX_REASON = 500
"""Characters to which a reason is cut."""


class ProtocolError(ValueError):
    """A message does not follow the protocol."""


class ProtocolVersionError(ProtocolError):
    """A message has another version of the format."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Prompt(_Part):
    id: str
    text: str | None
    messages: list[dict[str, Any]] | None
    template_variables: dict[str, Any] = Field(default_factory=dict)
    answer: str | None
    metadata: dict[str, Any]


class _Response(_Part):
    prompt: _Prompt
    sample_index: int
    text: str
    token_ids: list[int]
    finish: Literal["eos", "stop", "length", "terminated", "truncated", "aborted"]


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


class _Result(_Part):
    id: int
    state: Literal["scored", "model_fault", "infrastructure_fault", "not_applicable"]
    score: float | None = Field(allow_inf_nan=False)
    reason: str | None = None
    components: dict[str, float] = Field(default_factory=dict)
    token_rewards: list[float] | None = None


class _Reply(_Part):
    format: str
    results: list[_Result]


Body = TypeVar("Body", _Request, _Reply, _Check, _Checked)


def request_body(responses: Sequence[Response]) -> bytes:
    """The request to score `responses`. Raises DataError for a prompt whose metadata cannot be written as JSON."""
    items = [
        _Response(
            prompt=_Prompt(
                id=response.prompt.id,
                text=response.prompt.text,
                messages=None if response.prompt.messages is None else [dict(m) for m in response.prompt.messages],
                template_variables=dict(response.prompt.template_variables),
                answer=response.prompt.answer,
                metadata=dict(response.prompt.metadata),
            ),
            sample_index=response.sample_index,
            text=_encodable(response.text),
            token_ids=list(response.token_ids),
            finish=response.finish.value,
        )
        for response in responses
    ]
    return _encoded(_Request(format=SCHEMA, responses=items), {response.prompt.id for response in responses})


def read_request(body: bytes) -> list[Response]:
    """The responses of a request. Log-probs are 0 and the prompts have no token ids. Raises ProtocolError."""
    return [
        Response(
            prompt=Prompt(
                id=item.prompt.id,
                token_ids=(),
                text=item.prompt.text,
                messages=None if item.prompt.messages is None else tuple(item.prompt.messages),
                template_variables=item.prompt.template_variables,
                answer=item.prompt.answer,
                metadata=item.prompt.metadata,
            ),
            sample_index=item.sample_index,
            token_ids=tuple(item.token_ids),
            logprobs=torch.zeros(len(item.token_ids)),
            response_mask=torch.ones(len(item.token_ids), dtype=torch.bool),
            finish=Finish(item.finish),
            policy_version=0,
            text=item.text,
        )
        for item in _read(_Request, body).responses
    ]


def check_body(prompts: Sequence[Prompt], origins: Mapping[str, str]) -> bytes:
    """The request to check whether responses to these prompts can be scored.

    `origins` has the file and row of a prompt by its id. Raises DataError for a prompt whose metadata cannot be written
    as JSON.
    """
    named = [(origins.get(prompt.id, f"prompt '{prompt.id}'"), prompt) for prompt in prompts]
    rows = [_Row(origin=origin, answer=prompt.answer, metadata=dict(prompt.metadata)) for origin, prompt in named]
    return _encoded(_Check(format=SCHEMA, rows=rows), {origin for origin, _ in named})


def read_check(body: bytes) -> tuple[list[Prompt], dict[str, str]]:
    """The prompts of a check and their origins by id. Raises ProtocolError."""
    rows = _read(_Check, body).rows
    prompts = [
        Prompt(id=str(index), token_ids=(), text="", answer=row.answer, metadata=row.metadata)
        for index, row in enumerate(rows)
    ]
    return prompts, {str(index): row.origin for index, row in enumerate(rows)}


def checked_body(problem: str | None) -> bytes:
    """The reply to a check: the problem with the first row whose responses cannot be scored, or None."""
    return _Checked(format=SCHEMA, problem=None if problem is None else _encodable(problem)).model_dump_json().encode()


def read_checked(body: bytes) -> str | None:
    """The problem that a reply to a check names, or None. Raises ProtocolError."""
    problem = _read(_Checked, body).problem
    return None if problem is None else problem[:MAX_REASON]


def reply_body(scored: Sequence[Scored]) -> bytes:
    """The reply with one result per response. Components that are not finite are left out."""
    results = [
        _Result(
            id=index,
            state=item.state.value,
            score=item.score if item.state.has_score else None,
            reason=None if item.reason is None else _encodable(item.reason),
            components={name: float(value) for name, value in item.components.items() if math.isfinite(value)},
            token_rewards=None if item.token_rewards is None else list(item.token_rewards),
        )
        for index, item in enumerate(scored)
    ]
    return _Reply(format=SCHEMA, results=results).model_dump_json().encode()


def read_reply(body: bytes, responses: Sequence[Response]) -> list[Scored]:
    """The results for `responses`, in order. Raises ProtocolError unless there is one valid result for each."""
    results = _read(_Reply, body).results
    if [result.id for result in results] != list(range(len(responses))):
        raise ProtocolError(
            f"expected results for {count_of(len(responses), 'response')} with ids from 0, in order; got others"
        )
    return [_scored(result, response) for result, response in zip(results, responses, strict=True)]


def _encodable(text: str) -> str:
    """The text with lone surrogates, which UTF-8 cannot encode, replaced by question marks."""
    return text.encode(errors="replace").decode()


def _encoded(body: BaseModel, names: Iterable[str]) -> bytes:
    try:
        return body.model_dump_json().encode()
    except ValueError as error:
        raise DataError(
            f"a prompt cannot be sent to the reward service as JSON (one of {', '.join(sorted(names)[:3])}): "
            f"{error}; leave out the column that is not text, number, list or mapping"
        ) from error


def _read(schema: type[Body], body: bytes) -> Body:
    try:
        message = schema.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        if (version := _version(body)) not in (None, SCHEMA):
            raise ProtocolVersionError(f"its format is {version!r:.60}, this side uses {SCHEMA!r}") from None
        path = ".".join(map(str, first["loc"]))
        raise ProtocolError(f"{f'{path}: ' if path else ''}{first['msg']:.200}") from None
    if message.format != SCHEMA:
        raise ProtocolVersionError(f"its format is {message.format!r:.60}, this side uses {SCHEMA!r}")
    return message


class _Version(BaseModel):
    """The key that every version has."""

    format: str


def _version(body: bytes) -> str | None:
    try:
        return _Version.model_validate_json(body).format
    except ValidationError:
        return None


def _scored(result: _Result, response: Response) -> Scored:
    state = ScoreState(result.state)
    if (result.score is None) == state.has_score:
        raise ProtocolError(f"result {result.id} is {state.value} with score {result.score}")
    if not all(map(math.isfinite, result.components.values())):
        raise ProtocolError(f"result {result.id} has a component that is not finite")
    unnamed = [name for name in result.components if not re.fullmatch(COMPONENT, name)]
    if unnamed:
        raise ProtocolError(f"result {result.id} has a component {unnamed[0]!r:.60}, which cannot name a metric")
    return Scored(
        response=response,
        score=math.nan if result.score is None else result.score,
        state=state,
        components=result.components,
        reason=None if result.reason is None else result.reason[:MAX_REASON],
        token_rewards=_token_rewards(result, response),
    )


def _token_rewards(result: _Result, response: Response) -> tuple[float, ...] | None:
    rewards = result.token_rewards
    if rewards is None:
        return None
    if len(rewards) != len(response.token_ids) or not all(map(math.isfinite, rewards)):
        count = len(response.token_ids)
        raise ProtocolError(f"result {result.id} must have a finite reward for each of {count} tokens")
    return tuple(rewards)
