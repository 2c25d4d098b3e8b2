"""Packs whole examples of text into batches, and computes the loss on them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from proximo.algorithms.losses import sft_loss
from proximo.data.examples import TextExample
from proximo.models.language import LanguageModel
from proximo.models.packing import PackedResponses, pack, pack_nothing, plan_own_share


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
