"""What the passes of PPO alone would hold and compute, rehearsed with the code that runs them: rollout, policy update.

To be called inside `shapes_only()`. Every sequence has its greatest length.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from proximo.config.ppo.options import PPOConfig
from proximo.models.attention.cache import PromptCache, RowCache
from proximo.models.fake_tensor_profiler import Rehearsal
from proximo.models.heads import full_kl, token_logprobs
from proximo.models.language import LanguageModel
from proximo.models.packing import PackedResponses, pack
from proximo.models.precision.compute import casting
from proximo.models.scalar import ScalarModel
from proximo.plan.cost_model import CACHE, COPY, LOGITS, Batches, Lengths, StepCost, in_step
from proximo.ppo.roles.inference import sampling_options
from proximo.rollout.local import PREFILL_TOKENS, rows_for
from proximo.rollout.sampling import sample

_GROWTH_TOKENS = 16
"""The rows of a rollout are looked at after every so many new tokens."""


def policy_loss(
    policy: LanguageModel, reference: LanguageModel | None, config: PPOConfig, *, on_trunk: ScalarModel | None = None
) -> Callable[[Rehearsal, PackedResponses], Tensor]:
    """What the policy's update keeps for its gradient; terms per token weigh nothing and are left out.

    `on_trunk`: the value model whose loss is taken in the same pass.
    """
    temperature, bonus = config.rollout.temperature, config.policy_loss.entropy_coefficient
    in_loss = config.kl.apply_to == "loss" and config.kl.estimator == "full"

    def loss(rehearsal: Rehearsal, batch: PackedResponses) -> Tensor:
        hidden = policy.hidden_states(batch.packed, batch.predictors)
        with rehearsal.making(LOGITS):
            found = token_logprobs(hidden, policy.head, batch.targets, temperature=temperature, entropy=bonus > 0)
        total = found.logprobs.sum()
        if found.entropy is not None:
            total = total + found.entropy.sum()
        if in_loss:
            with torch.no_grad():
                other = (reference or policy).hidden_states(batch.packed, batch.predictors)
            with rehearsal.making(LOGITS):
                divergence = full_kl(hidden, policy.head, other, (reference or policy).head, temperature=temperature)
            total = total + divergence.sum()
        if on_trunk is not None:
            total = total + on_trunk.scores(hidden).sum()
        return total

    return loss


@torch.no_grad()
def reading_both(policy: LanguageModel, value: ScalarModel, batches: Batches) -> StepCost:
    """Log-probs and values by one pass through the trunk that they share."""
    batch = batches.largest()
    with Rehearsal([policy.model]) as rehearsal:
        hidden = policy.hidden_states(batch.packed)
        with rehearsal.making(LOGITS):
            token_logprobs(hidden[batch.predictors], policy.head, batch.targets)
        value.scores(hidden[batch.value_positions])
    return in_step(rehearsal.cost(), rehearsed=batches.tokens, tokens=batches.all_tokens)


@torch.no_grad()
def rollout(policy: LanguageModel, lengths: Lengths, config: PPOConfig) -> StepCost:
    """All responses of a step: prompts computed and placed, rows grown to their end, the last token of all drawn.

    The operations are those of the whole batch, with attention over half of the response on average.
    """
    num_prompts, num_samples = config.prompts_per_step, config.sampled_per_prompt
    num_rows = min(config.rollout.max_num_seqs, num_prompts * num_samples)
    together = max(1, min(num_prompts, math.ceil(num_rows / num_samples), PREFILL_TOKENS // lengths.prompt))
    with Rehearsal([policy.model]) as rehearsal, casting():
        with rehearsal.making(COPY):
            policy.backbone.cast_weights()
        cache = rows_for(lengths.prompt, num_rows=num_rows, max_new_tokens=lengths.response)
        packed = pack([[0] * lengths.prompt] * together)
        prompts = PromptCache(packed.lengths)
        hidden = policy.prefill(packed, prompts)
        for pair in prompts.captured.values():
            for tensor in pair:
                rehearsal.claim(tensor, CACHE)
        with rehearsal.making(LOGITS):
            policy.head.logits(hidden)
        of_prompts, rehearsal.flops = rehearsal.flops, 0
        with rehearsal.making(CACHE):
            for row in range(num_rows):
                cache.place(prompts, row % together, [row])
        del hidden, prompts
        _grow(cache, lengths, rehearsal)
        decoder = policy.decoder()
        for length in (lengths.total - 1, lengths.prompt + lengths.response // 2):
            rehearsal.flops = 0
            cache.lengths = [length - 1] * num_rows
            with rehearsal.making(CACHE):
                layout = cache.advance(num_rows)
            hidden = decoder(torch.zeros(num_rows, dtype=torch.long), layout.positions, cache, layout)
            with rehearsal.making(LOGITS):
                _draw(policy, hidden, config)
    cost = rehearsal.cost()
    decoded = num_prompts * num_samples * lengths.response
    return StepCost(
        parts=cost.parts,
        flops=of_prompts * num_prompts // together + cost.flops * decoded // num_rows,
        tokens=num_prompts * lengths.prompt + decoded,
        heap=cost.heap,
    )


def _grow(cache: RowCache, lengths: Lengths, rehearsal: Rehearsal) -> None:
    for length in range(lengths.prompt, lengths.total - 1, _GROWTH_TOKENS):
        cache.lengths = [length] * len(cache.lengths)
        with rehearsal.making(CACHE):
            cache.advance(len(cache.lengths))


def _draw(model: LanguageModel, hidden: Tensor, config: PPOConfig) -> None:
    rows = torch.zeros(hidden.shape[0], dtype=torch.long)
    ending = torch.zeros(1, dtype=torch.long)
    sample(model.head.logits(hidden), streams=rows, positions=rows, options=sampling_options(config), ending_ids=ending)
