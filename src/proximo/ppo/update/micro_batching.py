"""Which responses each update takes, and how a minibatch is cut into micro-batches. Not what is computed of them."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from proximo.config.ppo.options import PPOConfig
from proximo.errors import TrainingError
from proximo.learner.minibatches import plan_minibatches
from proximo.models.batching import plan_batches
from proximo.models.packing import PackedResponses, pack_responses, send
from proximo.ppo.update.microbatch import Microbatch
from proximo.records import Experience, Response


def plan_updates(experience: Experience, config: PPOConfig, *, seed: int, step: int) -> list[list[int]]:
    """The responses of each minibatch, epoch after epoch; `step` counts from 0.

    Raises TrainingError where no response has a token that counts.
    """
    parts = experience.mask.split(list(experience.lengths))
    members = [index for index, part in enumerate(parts) if part.any()]
    if not members:
        raise TrainingError(
            f"step {step + 1}: no response has a token that counts; all {len(parts)} were empty, cut off under "
            "truncation_value: mask, or could not be scored"
        )
    epochs = plan_minibatches(
        members, size=config.responses_per_update, num_epochs=config.epochs_per_step, seed=seed, step=step
    )
    return [minibatch for epoch in epochs for minibatch in epoch]


def cut_minibatch(
    experience: Experience,
    columns: dict[str, Tensor],
    minibatch: Sequence[int],
    *,
    token_budget: int,
    device: torch.device,
) -> list[Microbatch]:
    """The micro-batches of a minibatch, each of whole responses, filled up to the budget. `columns` are [T] each."""
    responses = [scored.response for scored in experience.scored]
    sizes, ends = experience.lengths, list(accumulate(experience.lengths))
    lengths = [len(responses[i].prompt.token_ids) + sizes[i] for i in minibatch]
    plan = plan_batches(lengths, token_budget=token_budget)
    chosen = [[minibatch[i] for i in indices] for indices in plan]
    # Looked up by place: cutting each column at all its responses takes several times as long.
    source = experience.mask.device
    places = [
        torch.cat([torch.arange(ends[i] - sizes[i], ends[i], device=source) for i in members]) for members in chosen
    ]
    masks = [experience.mask[where] for where in places]
    num_update_tokens = int(sum(mask.sum() for mask in masks))
    return [
        Microbatch(
            packed=pack_members(responses, members, device=device),
            mask=send(mask, device),
            columns={name: send(column[where], device) for name, column in columns.items()},
            num_update_tokens=num_update_tokens,
            num_update_responses=len(minibatch),
        )
        for members, where, mask in zip(chosen, places, masks, strict=True)
    ]


def pack_members(responses: Sequence[Response], indices: Sequence[int], *, device: torch.device) -> PackedResponses:
    """The chosen responses behind their prompts, packed."""
    chosen = [responses[i] for i in indices]
    return pack_responses([r.prompt.token_ids for r in chosen], [r.token_ids for r in chosen], device=device)
