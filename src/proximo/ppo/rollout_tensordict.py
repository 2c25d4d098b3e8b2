"""An experience as the rollout of a reinforcement learning environment: torchrl's TensorDict. Nothing here reads one.

Padding exists in this view only. The package tensordict is imported when it is asked for (extra `tensordict`).
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from proximo.algorithms.segments import segment_rows, value_positions
from proximo.errors import DataError, MissingExtraError
from proximo.records import Experience, Response


def rollout_tensordict(experience: Experience, *, pad_token_id: int) -> Any:
    """A TensorDict with each response as an episode: the state is the text so far, the action the next token.

    Batch size [B, T]: B responses that have a token, T tokens of the longest; time is named. L is the longest prompt
    with its response. Right of its end a row is padding: `mask` is False, all numbers 0.

    - `action` [B, T] int64, and `sample_log_prob` [B, T]: its log-prob at the start of the step;
    - `input_ids`, `attention_mask` [B, T, L]: what was read before it, `pad_token_id` and False behind that;
    - `mask` [B, T] bool: tokens that count in losses: not padding, not a tool's, not a response that is left out;
    - `("next", "input_ids")` and so on: the same with the action taken;
    - `("next", "done")`, `"terminated"`, `"truncated"` [B, T, 1] bool: done once in each row, at its last token;
      terminated where the policy ended the answer, else truncated;
    - `("next", "reward")` [B, T, 1], and its parts: `"reward_raw"` is the score as it was given, once, at the last
      token that counts; `"reward_kl"` is the rest: the KL penalty, and what the configuration did to the score;
    - `reference_log_prob` [B, T] in a run with a reference, `advantage` [B, T, 1], and with a critic `state_value` and
      `value_target` [B, T, 1].

    The states alone are B * T * L numbers, twice. Raises MissingExtraError without tensordict, DataError where no
    response has a token.
    """
    if find_spec("tensordict") is None:
        raise MissingExtraError(
            "rollout_tensordict needs the package tensordict: say pip install 'proximo[tensordict]'"
        )
    if not isinstance(experience, Experience):
        raise DataError(
            f"an Experience is wanted, got {type(experience).__name__}: trainer.run_step(...) returns a step that "
            "holds it, step.experience"
        )
    kept = [row for row, length in enumerate(experience.lengths) if length]
    if not kept:
        raise DataError("no response has a token, so there is no rollout to show")
    lengths = experience.lengths
    num_tokens = torch.tensor(lengths)[kept]

    def rows(per_token: Tensor) -> Tensor:
        return segment_rows(per_token, lengths)[kept]

    mask = rows(experience.mask)
    in_row = torch.arange(mask.shape[1]) < num_tokens[:, None]
    last = torch.arange(mask.shape[1]) == num_tokens[:, None] - 1
    responses = [experience.scored[row].response for row in kept]
    ended = torch.tensor([response.finish.terminated for response in responses])[:, None]
    reward = rows(experience.rewards)
    raw = _at_last(mask, [experience.scored[row].score for row in kept])
    ids, attention = _states(responses, num_steps=mask.shape[1], pad_token_id=pad_token_id)
    columns = {
        "action": rows(torch.tensor([token for each in experience.scored for token in each.response.token_ids])),
        "sample_log_prob": rows(experience.old_logprobs),
        "mask": mask,
        "advantage": rows(experience.advantages)[..., None],
        **_optional(experience, rows),
        **{"input_ids": ids[:, :-1], "attention_mask": attention[:, :-1] & in_row[..., None]},
    }
    following = {
        "input_ids": ids[:, 1:],
        "attention_mask": attention[:, 1:] & in_row[..., None],
        "done": last[..., None],
        "terminated": (last & ended)[..., None],
        "truncated": (last & ~ended)[..., None],
        "reward": reward[..., None],
        "reward_raw": raw[..., None],
        "reward_kl": (reward - raw)[..., None],
    }
    tensordict: Any = import_module("tensordict")
    shape, names = list(mask.shape), [None, "time"]
    made = tensordict.TensorDict(columns, batch_size=shape, names=names)
    made["next"] = tensordict.TensorDict(following, batch_size=shape, names=names)
    return made


def _optional(experience: Experience, rows: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    found = {}
    if experience.reference_logprobs is not None:
        found["reference_log_prob"] = rows(experience.reference_logprobs)
    if experience.values is not None and experience.returns is not None:
        found["state_value"] = rows(experience.values[value_positions(experience.lengths)])[..., None]
        found["value_target"] = rows(experience.returns)[..., None]
    return found


def _at_last(mask: Tensor, scores: Sequence[float]) -> Tensor:
    """[B, T]: the score of each row at its last True, 0 elsewhere and in rows without one."""
    steps = torch.arange(mask.shape[1])
    last = torch.where(mask, steps, -1).max(1).values
    return torch.where(mask & (steps == last[:, None]), torch.tensor(scores, dtype=torch.float32)[:, None], 0.0)


def _states(responses: Sequence[Response], *, num_steps: int, pad_token_id: int) -> tuple[Tensor, Tensor]:
    """[B, T + 1, L] ids and whether they are there: the prompt with none, one, two ... of the response's tokens."""
    whole = [(*response.prompt.token_ids, *response.token_ids) for response in responses]
    width = max(map(len, whole))
    ids = torch.tensor([[*tokens, *[pad_token_id] * (width - len(tokens))] for tokens in whole])
    prompts = torch.tensor([len(response.prompt.token_ids) for response in responses])
    full = torch.tensor([len(tokens) for tokens in whole])
    read = (prompts[:, None] + torch.arange(num_steps + 1)).minimum(full[:, None])
    there = torch.arange(width) < read[..., None]
    return torch.where(there, ids[:, None], pad_token_id), there
