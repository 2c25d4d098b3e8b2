"""The JSON messages between a reward service and its clients. Both sides validate them.

A request has everything of a response but its log-probs, and everything of its prompt but the token ids.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat, ValidationError

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


def _encodable(text: Any) -> Any:
    return text.encode(errors="replace").decode() if isinstance(text, str) else text


_Text = Annotated[str, BeforeValidator(_encodable)]
"""A text, with question marks for lone surrogates, which UTF-8 cannot encode."""
_Name = Annotated[str, Field(pattern=f"^({COMPONENT})$")]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, from_attributes=True)


class _Prompt(_Part):
    id: str
    text: str | None
    messages: tuple[dict[str, Any], ...] | None
    template_variables: dict[str, Any] = Field(default_factory=dict)
    answer: str | None
    metadata: dict[str, Any]


class _Response(_Part):
    prompt: _Prompt
    sample_index: int
    text: _Text
    token_ids: tuple[int, ...]
    finish: Finish


class _Row(_Part):
    origin: str
    answer: str | None
    metadata: dict[str, Any]


class _Result(_Part):
    id: int
    state: ScoreState
    score: FiniteFloat | None
    reason: _Text | None = None
    components: dict[_Name, FiniteFloat] = Field(default_factory=dict)
    token_rewards: tuple[FiniteFloat, ...] | None = None


class _Message(_Part):
    format: Literal["proximo.reward/1"]


class _Request(_Message):
    responses: tuple[_Response, ...]


class _Reply(_Message):
    results: tuple[_Result, ...]


class _Check(_Message):
    rows: tuple[_Row, ...]


class _Checked(_Message):
    problem: _Text | None


Body = TypeVar("Body", _Request, _Reply, _Check, _Checked)


def request_body(responses: Sequence[Response]) -> bytes:
    """The request to score `responses`. Raises DataError for a prompt whose metadata cannot be written as JSON."""
    items = tuple(_Response.model_validate(response, strict=False) for response in responses)
    return _encoded(_Request(format=SCHEMA, responses=items), {response.prompt.id for response in responses})


def read_request(body: bytes) -> list[Response]:
    """The responses of a request. Log-probs are 0 and the prompts have no token ids. Raises ProtocolError."""
    return [
        Response(
            prompt=Prompt(token_ids=(), **dict(item.prompt)),
            sample_index=item.sample_index,
            token_ids=item.token_ids,
            logprobs=torch.zeros(len(item.token_ids)),
            response_mask=torch.ones(len(item.token_ids), dtype=torch.bool),
            finish=item.finish,
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
    rows = tuple(_Row(origin=origin, answer=each.answer, metadata=dict(each.metadata)) for origin, each in named)
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
    return _Checked(format=SCHEMA, problem=problem).model_dump_json().encode()


def read_checked(body: bytes) -> str | None:
    """The problem that a reply to a check names, or None. Raises ProtocolError."""
    problem = _read(_Checked, body).problem
    return None if problem is None else problem[:MAX_REASON]


def reply_body(scored: Sequence[Scored]) -> bytes:
    """The reply with one result per response. Components that are not finite are left out."""
    results = tuple(
        _Result(
            id=index,
            state=item.state,
            score=item.score if item.state.has_score else None,
            reason=item.reason,
            components={name: float(value) for name, value in item.components.items() if math.isfinite(value)},
            token_rewards=None if item.token_rewards is None else tuple(item.token_rewards),
        )
        for index, item in enumerate(scored)
    )
    return _Reply(format=SCHEMA, results=results).model_dump_json().encode()


def read_reply(body: bytes, responses: Sequence[Response]) -> list[Scored]:
    """The results for `responses`, in order. Raises ProtocolError unless there is one valid result for each."""
    results = _read(_Reply, body).results
    if [result.id for result in results] != list(range(len(responses))):
        raise ProtocolError(
            f"expected results for {count_of(len(responses), 'response')} with ids from 0, in order; got others"
        )
    return [_scored(result, response) for result, response in zip(results, responses, strict=True)]


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
        return schema.model_validate_json(body)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        others = (each["input"] for each in problems if each["type"] == "literal_error" and each["loc"] == ("format",))
        if isinstance(version := next(others, None), str):
            raise ProtocolVersionError(f"its format is {version!r:.60}, this side uses {SCHEMA!r}") from None
        path = ".".join(map(str, problems[0]["loc"]))
        raise ProtocolError(f"{f'{path}: ' if path else ''}{problems[0]['msg']:.200}") from None


def _scored(result: _Result, response: Response) -> Scored:
    if (result.score is None) == result.state.has_score:
        raise ProtocolError(f"result {result.id} is {result.state.value} with score {result.score}")
    count = len(response.token_ids)
    if result.token_rewards is not None and len(result.token_rewards) != count:
        raise ProtocolError(f"result {result.id} must have a reward for each of {count} tokens")
    return Scored(
        response=response,
        score=math.nan if result.score is None else result.score,
        state=result.state,
        components=result.components,
        reason=None if result.reason is None else result.reason[:MAX_REASON],
        token_rewards=result.token_rewards,
    )
