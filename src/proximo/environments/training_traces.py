"""Captured runs of agents in the form of OpenEnv's TrainingTrace (schema_version 1): calls of a model as token ids.

A file has one trace a line. A turn of a trace is one call: the ids that it read, those that it wrote with their
log-probs, and a mask of what is learned. Rewards are no part of a trace; here they are in `metadata` of its turns.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from proximo.environments.trajectory import Trajectory
from proximo.errors import DataError
from proximo.records import Finish, Prompt, Response
from proximo.rollout.session import CallRequest, ModelCall

VERSION = 1
FOREIGN = -1
"""Version of a policy that this run never had."""


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
            if not any(turn["loss_mask"]):
                continue
            asked, answer = turn.get("request", {}).get("messages"), _message(turn)
            if not asked or answer is None:
                raise DataError(
                    f"{path}:{number}: turn {turn['node_id']!r} has token ids and no messages in request and response: "
                    "train on its tokens, with read_traces"
                )
            tools = turn["request"].get("tools")
            yield {"messages": [*asked, answer]} | ({"tools": tools} if tools else {})


def write_traces(path: str | Path, responses: Iterable[Response]) -> None:
    """Write trajectories, one trace a line. Raises DataError for a response without log-probs."""
    lines = [json.dumps(trace_of(response)) + "\n" for response in responses]
    Path(path).write_text("".join(lines), encoding="utf-8")


def trace_of(response: Response) -> dict[str, Any]:
    """The trace of a trajectory, or of an answer without an environment. Raises DataError if it has no log-probs."""
    bounds = [(turn.start, turn.end) for turn in response.episode.turns] if response.episode else []
    bounds = bounds or [(0, len(response.token_ids))]
    rewards = [turn.reward for turn in response.episode.turns] if response.episode else []
    turns = []
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
        turns.append(turn | ({"metadata": {"reward": rewards[number]}} if rewards else {}))
    return {"schema_version": VERSION, "turns": turns}


def _read_before(response: Response, position: int) -> list[int]:
    """All ids that the policy read before a token."""
    begun = [fork for fork in response.forks if fork.start <= position]
    context, start = (begun[-1].context, begun[-1].start) if begun else (response.prompt.token_ids, 0)
    return [*context, *response.token_ids[start:position]]


def _trajectory(turns: Sequence[Mapping[str, Any]], origin: str) -> tuple[Response, float | None]:
    learned = [turn for turn in turns if any(turn["loss_mask"])]
    if not learned:
        raise DataError(f"{origin}: no turn of this trace is learned")
    prompt = Prompt(id=origin, token_ids=tuple(learned[0]["prompt_token_ids"]))
    trajectory = Trajectory(prompt=prompt, sample_index=0)
    for number, turn in enumerate(learned):
        message = _message(turn)
        trajectory.add_call(_call(turn, number), str((message or {}).get("content") or ""))
        own = turn["loss_mask"][len(turn["prompt_token_ids"]) :]
        trajectory.mask[-len(own) :] = map(bool, own)
    rewards = [turn.get("metadata", {}).get("reward") for turn in turns]
    known = [float(reward) for reward in rewards if isinstance(reward, int | float) and math.isfinite(reward)]
    reason = _choice(learned[-1]).get("finish_reason")
    response = trajectory.response(Finish.LENGTH if reason == "length" else Finish.TERMINATED)
    return response, sum(known) if known else None


def _call(turn: Mapping[str, Any], number: int) -> ModelCall:
    request = CallRequest(
        id=number,
        lane=0,
        token_ids=tuple(turn["prompt_token_ids"]),
        stream=0,
        first_position=0,
        max_new_tokens=len(turn["completion_token_ids"]),
    )
    return ModelCall(
        request=request,
        token_ids=tuple(turn["completion_token_ids"]),
        logprobs=tuple(turn["per_token_logps"]),
        finish=Finish.EOS,
        versions=((FOREIGN, 0),),
    )


def _traces(path: str | Path) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """The number of each line that is not blank, and the turns of its trace, checked."""
    with Path(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, _checked(line, f"{path}:{number}")


def _checked(line: str, origin: str) -> list[dict[str, Any]]:
    try:
        trace = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{origin}: a line must be a whole trace as JSON: {error!s:.80}") from None
    turns = trace.get("turns") if isinstance(trace, dict) else None
    if not isinstance(turns, list) or trace.get("schema_version", VERSION) != VERSION:
        raise DataError(f"{origin}: a trace has schema_version {VERSION} and a list of turns, got {line[:80]!r}")
    for turn in turns:
        if problem := _problem(turn):
            named = turn.get("node_id") if isinstance(turn, dict) else None
            raise DataError(f"{origin}: turn {named!r}: {problem}")
    if len({turn["node_id"] for turn in turns}) != len(turns):
        raise DataError(f"{origin}: two turns have one node_id")
    return turns


def _problem(turn: Any) -> str | None:
    """What is wrong with a turn; None if nothing is."""
    if not isinstance(turn, dict) or not isinstance(turn.get("node_id"), str):
        return "it must be an object with a node_id"
    lists = [turn.get(name) for name in ("prompt_token_ids", "completion_token_ids", "per_token_logps", "loss_mask")]
    if not all(isinstance(each, list) for each in lists):
        return "prompt_token_ids, completion_token_ids, per_token_logps and loss_mask must be lists"
    asked, written, logprobs, mask = lists
    checks = {
        "token ids must be whole numbers from 0 on, and a prompt has at least one": (
            bool(asked) and all(type(token) is int and token >= 0 for token in (*asked, *written))
        ),
        "per_token_logps must have one number of at most 0 for each token written": (
            len(logprobs) == len(written)
            and all(type(each) in (int, float) and math.isfinite(each) and each <= 0 for each in logprobs)
        ),
        "loss_mask must have 0 for each token read, and 0 or 1 for each written": (
            len(mask) == len(asked) + len(written)
            and all(type(each) is int and each in (0, 1) for each in mask)
            and not any(mask[: len(asked)])
        ),
        "request, response and metadata must be objects": all(
            isinstance(turn.get(name, {}), dict) for name in ("request", "response", "metadata")
        ),
    }
    return next((problem for problem, holds in checks.items() if not holds), None)


def _choice(turn: Mapping[str, Any]) -> Mapping[str, Any]:
    """The first choice of a captured answer; empty if there is none."""
    choices = turn.get("response", {}).get("choices")
    first = choices[0] if isinstance(choices, list) and choices else {}
    return first if isinstance(first, dict) else {}


def _message(turn: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The message of a captured answer, in OpenAI's form; None if there is none."""
    message = _choice(turn).get("message")
    return message if isinstance(message, dict) else None
