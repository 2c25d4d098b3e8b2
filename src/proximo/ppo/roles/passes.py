"""Inference passes of a model over the responses of a step, in batches within the token budget."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from proximo.config.ppo.options import PPOConfig
from proximo.distributed.world import current
from proximo.models.batching import plan_shares
from proximo.models.language import LanguageModel
from proximo.models.packing import PackedResponses, shareable_prefixes
from proximo.models.precision.compute import casting
from proximo.models.scalar import ScalarModel
from proximo.ppo.update.micro_batching import pack_members
from proximo.records import Response


class LogprobsAndValues(NamedTuple):
    """What one pass through a shared trunk gives."""

    logprobs: Tensor
    """[T] log-probs of the response tokens."""
    values: Tensor
    """[T + R] values before each response token and after the last one, in units of the return."""


class ReferencePass(NamedTuple):
    """What the reference says of the responses."""

    logprobs: Tensor
    """[T] log-probs of the response tokens."""
    full_kl: Tensor | None = None
    """[T] KL over the whole vocabulary at each state; None where it is not measured."""


@torch.no_grad()
def over_batches(
    responses: Sequence[Response],
    run: Callable[[PackedResponses], Tensor],
    model: LanguageModel | ScalarModel,
    config: PPOConfig,
    *,
    extra: int = 0,
) -> Tensor:
    """Apply `run` to balanced batches, and return its rows in the order of the responses, on the CPU.

    `extra`: rows per response in addition to one per token. Results are copied to the CPU once at the end, so that no
    batch waits for the previous one. On several ranks each computes its share, and every rank gets all rows.
    """
    world = current()
    plans = plan_shares(
        [len(r.prompt.token_ids) + len(r.token_ids) for r in responses],
        token_budget=config.tokens_per_microbatch,
        num_ranks=world.size,
        prefixes=shareable_prefixes([r.prompt.token_ids for r in responses]),
    )
    results = []
    with casting(), model.backbone.at_work():
        for indices in plans[world.rank]:
            batch = pack_members(responses, indices, device=model.device)
            rows = model.backbone.run_pass(partial(run, batch))
            results.append(rows if indices else rows[:0])
    rows = world.gather_rows(torch.cat(results), what="what a model gives for the responses")
    order = [index for plan in plans for indices in plan for index in indices]
    sizes = [len(responses[index].token_ids) + extra for index in order]
    pieces = dict(zip(order, rows.split(sizes), strict=True))
    return torch.cat([pieces[index] for index in range(len(responses))])


def logprobs_of(model: LanguageModel, responses: Sequence[Response], config: PPOConfig) -> Tensor:
    """[T] log-probs of the response tokens at the temperature of the rollout."""
    temperature = config.rollout.temperature
    return over_batches(
        responses, lambda batch: model.response_logprobs(batch, temperature=temperature).logprobs, model, config
    )
