"""Captured runs of agents in the form of OpenEnv's TrainingTrace (schema_version 1): calls of a model as token ids.

A file has one trace a line. A turn of a trace is one call: the ids that it read, those that it wrote with their
log-probs, and a mask of what is learned. Rewards and ends are no part of a trace; here they are in `metadata`: each
turn has its `reward`, and the last one has `finish` and `after_token_ids`, all ids that a further turn would read.
"""

import json
import math
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from proximo.environments.trajectory import Trajectory
from proximo.errors import DataError
from proximo.records import Finish, Prompt, Response
from proximo.rollout.session import CallRequest, ModelCall

VERSION = 1
FOREIGN = -1
"""Version of a policy that this run never had."""
_Id = Annotated[int, Field(ge=0, lt=2**31)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


class _Metadata(_Part):
    reward: FiniteFloat | None = None
    finish: Literal["eos", "stop", "length", "terminated", "truncated"] | None = None
    after_token_ids: list[_Id] = Field(default_factory=list)


class _Turn(_Part):
    """One call of the model."""

    node_id: str
    prompt_token_ids: list[_Id] = Field(min_length=1)
    completion_token_ids: list[_Id]
    per_token_logps: list[Annotated[FiniteFloat, Field(le=0)]]
    loss_mask: list[Annotated[int, Field(ge=0, le=1)]]
    request: dict[str, Any] = Field(default_factory=dict)
    response: dict[str, Any] = Field(default_factory=dict)
    metadata: _Metadata = Field(default_factory=_Metadata)

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        num_read, num_written = len(self.prompt_token_ids), len(self.completion_token_ids)
        if len(self.per_token_logps) != num_written:
            raise ValueError("per_token_logps must have one number for each token written")
        if len(self.loss_mask) != num_read + num_written or any(self.loss_mask[:num_read]):
            raise ValueError("loss_mask must have 0 for each token read, and 0 or 1 for each written")
        return self

    @property
    def is_learned(self) -> bool:
        return any(self.loss_mask)

    @property
    def choice(self) -> dict[str, Any]:
        """The first choice of a captured answer; empty if there is none."""
        choices = self.response.get("choices")
        first = choices[0] if isinstance(choices, list) and choices else {}
        return first if isinstance(first, dict) else {}

    @property
    def message(self) -> dict[str, Any] | None:
        """The message of a captured answer, in OpenAI's form; None if there is none."""
        message = self.choice.get("message")
        return message if isinstance(message, dict) else None


class _Trace(_Part):
    schema_version: Literal[1] = VERSION
    turns: list[_Turn]


def read_traces(path: str | Path) -> list[tuple[Response, float | None]]:
    """The trajectory of each trace with its reward, None where the file has none.

    They are for `PPOTrainer.step`, with a `behaviour_weight`, since another policy drew them. The ids must be those of
    the policy that learns from them. A turn that nobody learns is left out: what followed it has it in its prompt.
    Raises DataError, with the line, for a trace that breaks the form.
    """
    return [_trajectory(turns, f"{path}:{number}") for number, turns in _traces(path)]


def trace_rows(path: str | Path) -> Iterator[dict[str, Any]]:
    """Rows for fine-tuning (`data.sources.function`): the messages of each call that is learned, with its answer.

    Set `data.train_on: last_response`, since each call is a row. Raises DataError for a trace without messages.
    """
    for number, turns in _traces(path):
        for turn in turns:
            if not turn.is_learned:
                continue
            asked, answer = turn.request.get("messages"), turn.message
            if not asked or answer is None:
                raise DataError(
                    f"{path}:{number}: turn {turn.node_id!r} has token ids and no messages in request and response: "
                    "train on its tokens, with read_traces"
                )
            tools = turn.request.get("tools")
            yield {"messages": [*asked, answer]} | ({"tools": tools} if tools else {})


def write_traces(path: str | Path, responses: Iterable[Response]) -> None:
    """Write trajectories, one trace a line.

    Raises DataError for one that failed, which is worth nothing: leave it out; and for one without log-probs.
    """
    lines = [json.dumps(trace_of(response)) + "\n" for response in responses]
    Path(path).write_text("".join(lines), encoding="utf-8")


def trace_of(response: Response) -> dict[str, Any]:
    """The trace of a trajectory, or of an answer without an environment. Raises DataError as `write_traces` does."""
    if response.finish is Finish.ABORTED:
        why = response.episode.failure if response.episode else None
        raise DataError(f"a response to prompt '{response.prompt.id}' has failed ({why or 'aborted'}): leave it out")
    bounds = [(turn.start, turn.end) for turn in response.episode.turns] if response.episode else []
    bounds = bounds or [(0, len(response.token_ids))]
    rewards = [turn.reward for turn in response.episode.turns] if response.episode else []
    turns: list[dict[str, Any]] = []
    for number, (start, end) in enumerate(bounds):
        logprobs = response.logprobs[start:end].tolist()
        if len(logprobs) != end - start or not all(map(math.isfinite, logprobs)):
            raise DataError(f"a response to prompt '{response.prompt.id}' has no log-probs of its tokens")
        read = _read_before(response, start)
        turn = {
            "node_id": f"{response.prompt.id}/{response.sample_index}/{number}",
            "prompt_token_ids": read,
            "completion_token_ids": list(response.token_ids[start:end]),
            "per_token_logps": logprobs,
            "loss_mask": [0] * len(read) + response.response_mask[start:end].int().tolist(),
        }
        turns.append(turn | {"metadata": {"reward": rewards[number]} if rewards else {}})
    after = _read_before(response, len(response.token_ids))
    turns[-1]["metadata"] |= {"finish": str(response.finish), "after_token_ids": after}
    return {"schema_version": VERSION, "turns": turns}


def _read_before(response: Response, position: int) -> list[int]:
    """All ids that the policy read before a token."""
    begun = [fork for fork in response.forks if fork.start <= position]
    context, start = (begun[-1].context, begun[-1].start) if begun else (response.prompt.token_ids, 0)
    return [*context, *response.token_ids[start:position]]


def _trajectory(turns: Sequence[_Turn], origin: str) -> tuple[Response, float | None]:
    learned = [turn for turn in turns if turn.is_learned]
    if not learned:
        raise DataError(f"{origin}: no turn of this trace is learned")
    prompt = Prompt(id=origin, token_ids=tuple(learned[0].prompt_token_ids))
    trajectory = Trajectory(prompt=prompt, sample_index=0)
    rewards = [0.0] * len(learned)
    num_added = 0
    for turn in turns:
        if turn.is_learned:
            trajectory.add_call(_call(turn, num_added), str((turn.message or {}).get("content") or ""))
            own = turn.loss_mask[len(turn.prompt_token_ids) :]
            trajectory.mask[-len(own) :] = map(bool, own)
            num_added += 1
        rewards[max(num_added - 1, 0)] += turn.metadata.reward or 0.0
    trajectory.turns = [replace(turn, reward=earned) for turn, earned in zip(trajectory.turns, rewards, strict=True)]
    last = turns[-1]
    if last.metadata.after_token_ids:
        trajectory.add_prompt(last.metadata.after_token_ids)
    # One that does not say how it ended has ended by itself, or by the length of its last answer.
    unsaid = Finish.LENGTH if last.choice.get("finish_reason") == "length" else Finish.TERMINATED
    finish = unsaid if last.metadata.finish is None else Finish(last.metadata.finish)
    is_rewarded = any(turn.metadata.reward is not None for turn in turns)
    return trajectory.response(finish), sum(rewards) if is_rewarded else None


def _call(turn: _Turn, number: int) -> ModelCall:
    request = CallRequest(
        id=number,
        lane=0,
        token_ids=tuple(turn.prompt_token_ids),
        stream=0,
        first_position=0,
        max_new_tokens=len(turn.completion_token_ids),
    )
    return ModelCall(
        request=request,
        token_ids=tuple(turn.completion_token_ids),
        logprobs=tuple(turn.per_token_logps),
        finish=Finish.EOS,
        versions=((FOREIGN, 0),),
    )


def _traces(path: str | Path) -> Iterator[tuple[int, list[_Turn]]]:
    """The number of each line that is not blank, and the turns of its trace, checked."""
    with Path(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, _checked(line, f"{path}:{number}")


def _checked(line: str, origin: str) -> list[_Turn]:
    try:
        turns = _Trace.model_validate(json.loads(line)).turns
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "a trace"
        raise DataError(f"{origin}: {place}: {first['msg']}, got {reprlib.repr(first['input']):.80}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{origin}: a line must be a whole trace as JSON: {error!s:.80}") from None
    if len({turn.node_id for turn in turns}) != len(turns):
        raise DataError(f"{origin}: two turns have one node_id")
    return turns
