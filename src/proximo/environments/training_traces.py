"""Captured runs of agents in the form of OpenEnv's TrainingTrace (schema_version 1): calls of a model as token ids.

A file has one trace a line. A turn of a trace is one call: the ids that it read, those that it wrote with their
log-probs, and a mask of what is learned. Rewards and ends are no part of a trace; here they are in `metadata`: each
turn has its `reward`, and the last one has `finish` and `after_token_ids`, all ids that a further turn would read.
"""

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from proximo.environments.trajectory import Trajectory
from proximo.errors import DataError
from proximo.records import Finish, Prompt, Response
from proximo.rollout.session import CallRequest, ModelCall

VERSION = 1
ENDS = tuple(str(finish) for finish in Finish if finish is not Finish.ABORTED)
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


def _trajectory(turns: Sequence[Mapping[str, Any]], origin: str) -> tuple[Response, float | None]:
    learned = [turn for turn in turns if any(turn["loss_mask"])]
    if not learned:
        raise DataError(f"{origin}: no turn of this trace is learned")
    prompt = Prompt(id=origin, token_ids=tuple(learned[0]["prompt_token_ids"]))
    trajectory = Trajectory(prompt=prompt, sample_index=0)
    rewards = [0.0] * len(learned)
    num_added = 0
    for turn in turns:
        if any(turn["loss_mask"]):
            message = _message(turn) or {}
            trajectory.add_call(_call(turn, num_added), str(message.get("content") or ""))
            own = turn["loss_mask"][len(turn["prompt_token_ids"]) :]
            trajectory.mask[-len(own) :] = map(bool, own)
            num_added += 1
        rewards[max(num_added - 1, 0)] += _metadata(turn).get("reward") or 0.0
    trajectory.turns = [replace(turn, reward=earned) for turn, earned in zip(trajectory.turns, rewards, strict=True)]
    if after := _metadata(turns[-1]).get("after_token_ids"):
        trajectory.add_prompt(after)
    is_rewarded = any(_metadata(turn).get("reward") is not None for turn in turns)
    return trajectory.response(_finish(turns[-1])), sum(rewards) if is_rewarded else None


def _finish(last: Mapping[str, Any]) -> Finish:
    """How a trace ended; one that does not say has ended by itself, or by the length of its last answer."""
    if said := _metadata(last).get("finish"):
        return Finish(said)
    return Finish.LENGTH if _choice(last).get("finish_reason") == "length" else Finish.TERMINATED


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
            bool(asked) and all(map(_is_id, (*asked, *written)))
        ),
        "per_token_logps must have one number of at most 0 for each token written": (
            len(logprobs) == len(written) and all(_is_number(each) and each <= 0 for each in logprobs)
        ),
        "loss_mask must have 0 for each token read, and 0 or 1 for each written": (
            len(mask) == len(asked) + len(written)
            and all(type(each) is int and each in (0, 1) for each in mask)
            and not any(mask[: len(asked)])
        ),
        "request, response and metadata must be objects": all(
            isinstance(turn.get(name, {}), dict) for name in ("request", "response", "metadata")
        ),
        "metadata.reward must be a finite number, or null": (
            (reward := _metadata(turn).get("reward")) is None or _is_number(reward)
        ),
        f"metadata.finish must be one of {', '.join(ENDS)}": _metadata(turn).get("finish") in (None, *ENDS),
        "metadata.after_token_ids must be a list of token ids": (
            isinstance(after := _metadata(turn).get("after_token_ids", []), list) and all(map(_is_id, after))
        ),
    }
    return next((problem for problem, holds in checks.items() if not holds), None)


def _is_id(token: Any) -> bool:
    return type(token) is int and 0 <= token < 2**31


def _is_number(value: Any) -> bool:
    """Whether it is a number that a float can hold: JSON has larger ones."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _metadata(turn: Mapping[str, Any]) -> Mapping[str, Any]:
    """The metadata of a turn; empty if there is none."""
    found = turn.get("metadata", {})
    return found if isinstance(found, dict) else {}


def _choice(turn: Mapping[str, Any]) -> Mapping[str, Any]:
    """The first choice of a captured answer; empty if there is none."""
    choices = turn.get("response", {}).get("choices")
    first = choices[0] if isinstance(choices, list) and choices else {}
    return first if isinstance(first, dict) else {}


def _message(turn: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The message of a captured answer, in OpenAI's form; None if there is none."""
    message = _choice(turn).get("message")
    return message if isinstance(message, dict) else None
