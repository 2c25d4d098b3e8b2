"""Batches of an update: responses divided into minibatches, and texts packed into micro-batches with their loss."""

from collections.abc import Hashable, Sequence

import numpy as np
import torch
from torch import Tensor

from proximo.algorithms.losses import sft_loss
from proximo.data.examples import TextExample
from proximo.models.language import LanguageModel
from proximo.models.packing import PackedResponses, pack, pack_nothing, plan_own_share


def plan_minibatches(
    members: Sequence[int],
    *,
    size: int,
    num_epochs: int,
    seed: int,
    step: int,
    groups: Sequence[Hashable] | None = None,
) -> list[list[list[int]]]:
    """epoch -> minibatch -> members, each member once per epoch; the last minibatch of an epoch may be smaller.

    `groups`: the group of each member. Then groups are permuted, and the members of a group stay together. None
    permutes members.
    The result depends only on the arguments, so a resumed run that repeats a step sees the same minibatches.
    """
    together: dict[Hashable, list[int]] = {}
    for place, member in enumerate(members):
        together.setdefault(place if groups is None else groups[place], []).append(member)
    units = list(together.values())
    plan = []
    for epoch in range(num_epochs):
        order = np.random.Generator(np.random.Philox(key=[seed, (step << 16) + epoch])).permutation(len(units))
        shuffled = [member for i in order for member in units[i]]
        plan.append([shuffled[start : start + size] for start in range(0, len(shuffled), size)])
    return plan


def num_minibatches(num_members: int, size: int) -> int:
    """Minibatches of one epoch."""
    return -(-num_members // size)


def text_batches(examples: Sequence[TextExample], *, token_budget: int, device: torch.device) -> list[PackedResponses]:
    """This rank's share of balanced batches. All ranks together have every example once."""
    plan = plan_own_share([len(example.token_ids) for example in examples], token_budget=token_budget)
    return [pack_examples([examples[i] for i in indices], device=device) for indices in plan]


def text_nats(model: LanguageModel, batch: PackedResponses) -> Tensor:
    """The negative log-likelihood of the counted tokens of a batch, their sum in nats, at temperature 1."""
    return sft_loss(model.response_logprobs(batch, temperature=1.0).logprobs).sum()


def pack_examples(examples: Sequence[TextExample], *, device: torch.device) -> PackedResponses:
    """Pack whole examples; the counted tokens are the targets. Without an example there is nothing to predict."""
    if not examples:
        return pack_nothing(device)
    packed = pack([example.token_ids for example in examples], device=device)
    flags = torch.tensor([flag for example in examples for flag in example.loss_mask], dtype=torch.bool, device=device)
    positions = flags.nonzero().squeeze(1)
    return PackedResponses(
        packed=packed,
        predictors=positions - 1,
        targets=packed.token_ids[positions],
        value_positions=positions.new_empty(0),
        response_lengths=tuple(example.num_targets for example in examples),
    )
