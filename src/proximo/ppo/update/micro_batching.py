"""Plans the minibatches of a step, and splits a minibatch into micro-batches."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from proximo.config.ppo.options import PPOConfig
from proximo.errors import TrainingError
from proximo.learner.minibatches import plan_minibatches
from proximo.models.batching import plan_own_share
from proximo.models.packing import PackedResponses, pack_nothing, pack_responses, send, shareable_prefixes
from proximo.ppo.update.microbatch import Microbatch
from proximo.records import Experience, Response


def plan_updates(experience: Experience, config: PPOConfig, *, seed: int, step: int) -> list[list[int]]:
    """Indices of the responses of each minibatch, over all epochs. `step` counts from 0.

    Raises TrainingError if no response has a token in the mask.
    """
    parts = experience.mask.split(list(experience.lengths))
    members = [index for index, part in enumerate(parts) if part.any()]
    if not members:
        raise TrainingError(
            f"step {step + 1}: no response has a token that counts; all {len(parts)} were empty, cut off under "
            "truncation: mask, or could not be scored"
        )
    groups: list[int] | list[str] | None = None
    if config.policy_loss.is_pairwise:  # not by the prompt, of which a step may have several pairs
        groups = [index // 2 for index in members]
    elif config.groups_together:
        groups = [experience.scored[index].response.prompt.id for index in members]
    epochs = plan_minibatches(
        members,
        size=config.responses_per_update,
        num_epochs=config.epochs_per_step,
        seed=seed,
        step=step,
        groups=groups,
    )
    return [minibatch for epoch in epochs for minibatch in epoch]


def cut_minibatch(
    experience: Experience,
    columns: dict[str, Tensor],
    minibatch: Sequence[int],
    *,
    token_budget: int,
    device: torch.device,
    in_pairs: bool = False,
) -> list[Microbatch]:
    """Split a minibatch into micro-batches of whole responses within the token budget. `columns`: name -> [T].

    On several ranks these are this rank's micro-batches. One without responses is a pass over nothing. `in_pairs`: each
    two responses that follow one another stay together, also where they exceed the budget.
    """
    responses = [scored.response for scored in experience.scored]
    sizes, ends = experience.lengths, list(accumulate(experience.lengths))
    units = [minibatch[i : i + 2] for i in range(0, len(minibatch), 2)] if in_pairs else [[i] for i in minibatch]
    prompts = [responses[unit[0]].prompt.token_ids for unit in units]
    plan = plan_own_share(
        # The responses of a pair share their prompt, except for its last token.
        [
            len(prompt) + sum(sizes[i] for i in unit) + len(unit) - 1
            for prompt, unit in zip(prompts, units, strict=True)
        ],
        token_budget=token_budget,
        prefixes=shareable_prefixes(prompts),
    )
    chosen = [[i for index in indices for i in units[index]] for indices in plan]
    # Indexing is several times as fast as splitting every column into all its responses.
    source = experience.mask.device

    def indices_of(members: Sequence[int]) -> Tensor:
        nothing = torch.arange(0, device=source)
        return torch.cat([nothing, *(torch.arange(ends[i] - sizes[i], ends[i], device=source) for i in members)])

    token_indices = [indices_of(members) for members in chosen]
    masks = [experience.mask[indices] for indices in token_indices]
    num_update_tokens = int(experience.mask[indices_of(minibatch)].sum())
    return [
        Microbatch(
            packed=pack_members(responses, members, device=device),
            mask=send(mask, device),
            columns={name: send(column[indices], device) for name, column in columns.items()},
            num_update_tokens=num_update_tokens,
            num_update_responses=len(minibatch),
        )
        for members, indices, mask in zip(chosen, token_indices, masks, strict=True)
    ]


def pack_members(responses: Sequence[Response], indices: Sequence[int], *, device: torch.device) -> PackedResponses:
    """Pack the selected responses with their prompts; none of them as a sequence of one token without a response."""
    if not indices:
        return pack_nothing(device)
    chosen = [responses[i] for i in indices]
    return pack_responses([r.prompt.token_ids for r in chosen], [r.token_ids for r in chosen], device=device)
