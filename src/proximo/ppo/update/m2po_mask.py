"""Which tokens of a minibatch M2PO learns from, found before its update. Not the loss: algorithms/objectives.py."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from proximo.algorithms.objectives import within_second_moment
from proximo.config.ppo.options import PPOConfig
from proximo.models.language import LanguageModel
from proximo.ppo.update.microbatch import Microbatch


@torch.no_grad()
def mark_trusted(batches: Sequence[Microbatch], policy: LanguageModel, config: PPOConfig) -> list[Microbatch]:
    """The micro-batches of one minibatch with a column `trusted`, 1 or 0; unchanged under any other objective.

    The second moment is that of the whole minibatch under the policy as it is now, so that the choice does not depend
    on the cut into micro-batches. It costs one more forward pass per update.
    """
    if config.policy_loss.objective != "m2po":
        return list(batches)
    temperature = config.rollout.temperature
    log_ratios = [
        policy.response_logprobs(batch.packed, temperature=temperature).logprobs - batch.columns["old_logprobs"]
        for batch in batches
    ]
    masks = [batch.mask for batch in batches]
    trusted = within_second_moment(
        torch.cat(log_ratios), torch.cat(masks), limit=config.policy_loss.max_second_moment
    ).split([len(mask) for mask in masks])
    return [
        replace(batch, columns=batch.columns | {"trusted": part.to(ratios.dtype)})
        for batch, part, ratios in zip(batches, trusted, log_ratios, strict=True)
    ]
