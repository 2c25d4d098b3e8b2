"""Exports an experience as a TensorDict rollout, as torchrl expects it.

This view is padded, unlike all other data. The package tensordict (extra `tensordict`) is imported on use.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from proximo.algorithms.masking import segment_rows, value_positions
from proximo.errors import DataError, MissingExtraError
from proximo.records import Experience, Response


def rollout_tensordict(experience: Experience, *, pad_token_id: int) -> Any:
    """A TensorDict with one episode per response: the state is the text so far, the action the next token.

    Batch size [B, T]: B non-empty responses, T tokens of the longest. The second dimension is named "time". L is the
    length of the longest prompt plus response. Rows are padded on the right: there, `mask` is False and numbers are 0.

    - `action` [B, T] int64, and `sample_log_prob` [B, T]: its log-prob at the start of the step;
    - `input_ids`, `attention_mask` [B, T, L]: the tokens before the action, then `pad_token_id` and False;
    - `mask` [B, T] bool: tokens that count in losses: no padding, no tool output, no response that is left out;
    - `("next", "input_ids")` and so on: the same after the action;
    - `("next", "done")`, `"terminated"`, `"truncated"` [B, T, 1] bool: True at the last token of each row;
      `terminated` if the policy ended the response, else `truncated`;
    - `("next", "reward")` [B, T, 1], and its parts: `"reward_raw"` is the raw score, at the last token that
      counts; `"reward_kl"` is the rest: the KL penalty and the shaping of the score;
    - `reference_log_prob` [B, T] in a run with a reference, `advantage` [B, T, 1], and with a critic `state_value` and
      `value_target` [B, T, 1].

    The states take 2 * B * T * L numbers. Raises MissingExtraError without tensordict, DataError if no response has a
    token.
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
        "action": rows(torch.tensor([token for s in experience.scored for token in s.response.token_ids])),
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
    rollout = tensordict.TensorDict(columns, batch_size=shape, names=names)
    rollout["next"] = tensordict.TensorDict(following, batch_size=shape, names=names)
    return rollout


def _optional(experience: Experience, rows: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    columns = {}
    if experience.reference_logprobs is not None:
        columns["reference_log_prob"] = rows(experience.reference_logprobs)
    if experience.values is not None and experience.returns is not None:
        columns["state_value"] = rows(experience.values[value_positions(experience.lengths)])[..., None]
        columns["value_target"] = rows(experience.returns)[..., None]
    return columns


def _at_last(mask: Tensor, scores: Sequence[float]) -> Tensor:
    """[B, T] the score of each row at the last True of its mask; 0 elsewhere, and in rows without a True."""
    steps = torch.arange(mask.shape[1])
    last = torch.where(mask, steps, -1).max(1).values
    return torch.where(mask & (steps == last[:, None]), torch.tensor(scores, dtype=torch.float32)[:, None], 0.0)


def _states(responses: Sequence[Response], *, num_steps: int, pad_token_id: int) -> tuple[Tensor, Tensor]:
    """[B, T + 1, L] token ids and attention mask: the prompt with the first 0, 1, 2, ... tokens of the response."""
    if any(response.forks for response in responses):
        raise DataError(
            "a trajectory goes on in a further sequence after a fork, and the layout of torchrl has one for each row: "
            "leave out the trajectories with forks, or take a chat template that keeps earlier turns"
        )
    whole = [(*response.prompt.token_ids, *response.token_ids) for response in responses]
    width = max(map(len, whole))
    ids = torch.tensor([[*tokens, *[pad_token_id] * (width - len(tokens))] for tokens in whole])
    prompts = torch.tensor([len(response.prompt.token_ids) for response in responses])
    full = torch.tensor([len(tokens) for tokens in whole])
    read = (prompts[:, None] + torch.arange(num_steps + 1)).minimum(full[:, None])
    attention = torch.arange(width) < read[..., None]
    return torch.where(attention, ids[:, None], pad_token_id), attention
