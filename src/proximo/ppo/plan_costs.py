"""Profiles the passes that only PPO has: rollout and policy update.

Call these functions inside `shapes_only()`. Every sequence is assumed to have the maximum length.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from proximo.config.ppo.options import PPOConfig
from proximo.models.attention.cache import PromptCache, RowCache
from proximo.models.heads import full_kl, token_logprobs
from proximo.models.language import LanguageModel
from proximo.models.packing import PackedResponses, pack
from proximo.models.precision.compute import casting
from proximo.models.scalar import ScalarModel
from proximo.plan.cost_model import CACHE, COPY, LOGITS, Batches, Lengths, Passes, StepCost, reading_cost
from proximo.plan.fake_tensor_profiler import PassProfiler
from proximo.ppo.roles.policy import sampling_options
from proximo.rollout.local import PREFILL_TOKENS, rows_for
from proximo.rollout.sampling import sample

_GROWTH_TOKENS = 16
"""The KV cache of a rollout is grown in steps of this many tokens, to find its memory peak."""


def policy_loss(
    policy: LanguageModel, reference: LanguageModel | None, config: PPOConfig, *, on_trunk: ScalarModel | None = None
) -> Callable[[PassProfiler, PackedResponses], Tensor]:
    """The part of the policy loss that decides memory, for the profiler: terms of one number per token are left out.

    `on_trunk`: the value model that is trained in the same pass.
    """
    temperature, bonus = config.rollout.temperature, config.policy_loss.entropy_coefficient
    in_loss = config.kl.apply_to == "loss" and config.kl.estimator == "full"

    def loss(profiler: PassProfiler, batch: PackedResponses) -> Tensor:
        hidden = policy.hidden_states(batch.packed, batch.predictors)
        with profiler.attribute_to(LOGITS):
            tokens = token_logprobs(hidden, policy.head, batch.targets, temperature=temperature, entropy=bonus > 0)
        total = tokens.logprobs.sum()
        if tokens.entropy is not None:
            total = total + tokens.entropy.sum()
        if in_loss:
            with torch.no_grad():
                other = (reference or policy).hidden_states(batch.packed, batch.predictors)
            with profiler.attribute_to(LOGITS):
                divergence = full_kl(hidden, policy.head, other, (reference or policy).head, temperature=temperature)
            total = total + divergence.sum()
        if on_trunk is not None:
            total = total + on_trunk.scores(hidden).sum()
        return total

    return loss


@torch.no_grad()
def logprobs_and_values_cost(policy: LanguageModel, value: ScalarModel, batches: Batches) -> StepCost:
    """Cost of computing log-probs and values in one pass through their shared trunk."""
    batch = batches.largest()
    with PassProfiler([policy.model]) as profiler:
        hidden = policy.hidden_states(batch.packed)
        with profiler.attribute_to(LOGITS):
            token_logprobs(hidden[batch.predictors], policy.head, batch.targets)
        value.scores(hidden[batch.value_positions])
    return reading_cost(profiler.cost(), [policy.model, value.model], batches)


@torch.no_grad()
def rollout(policy: LanguageModel, lengths: Lengths, config: PPOConfig) -> StepCost:
    """Cost of sampling all responses of a step: prefill, growth of the KV cache, and sampling of the last token.

    Profiles one batch of rows and scales the FLOPs to all. FLOPs of decoding are counted at half of the response, the
    mean.
    """
    num_prompts, num_samples = config.prompts_per_step, config.sampled_per_prompt
    num_rows = min(config.rollout.max_num_seqs, num_prompts * num_samples)
    num_prefilled = max(1, min(num_prompts, math.ceil(num_rows / num_samples), PREFILL_TOKENS // lengths.prompt))
    with PassProfiler([policy.model]) as profiler, casting():
        with profiler.attribute_to(COPY):
            policy.backbone.cast_weights()
        cache = rows_for(lengths.prompt, num_rows=num_rows, max_new_tokens=lengths.response)
        packed = pack([[0] * lengths.prompt] * num_prefilled)
        prompts = PromptCache(packed.lengths)
        hidden = policy.prefill(packed, prompts)
        for pair in prompts.captured.values():
            for tensor in pair:
                profiler.reassign(tensor, CACHE)
        with profiler.attribute_to(LOGITS):
            policy.head.logits(hidden)
        prefill_flops, profiler.flops = profiler.flops, 0
        with profiler.attribute_to(CACHE):
            for row in range(num_rows):
                cache.place(prompts, row % num_prefilled, [row])
        del hidden, prompts
        _grow(cache, lengths, profiler)
        decoder = policy.decoder()
        # The last token has the highest peak; the token in the middle of the response has the mean FLOPs.
        for length in (lengths.total - 1, lengths.prompt + lengths.response // 2):
            profiler.flops = 0
            cache.lengths = [length - 1] * num_rows
            with profiler.attribute_to(CACHE):
                layout = cache.advance(num_rows)
            hidden = decoder(torch.zeros(num_rows, dtype=torch.long), layout.positions, cache, layout)
            with profiler.attribute_to(LOGITS):
                _draw(policy, hidden, config)
    cost = profiler.cost()
    decoded = num_prompts * num_samples * lengths.response
    return StepCost(
        parts=cost.parts,
        flops=prefill_flops * num_prompts // num_prefilled + cost.flops * decoded // num_rows,
        tokens=num_prompts * lengths.prompt + decoded,
        heap=cost.heap,
        passes=(
            Passes(
                kind="rollout",
                modules=(policy.model,),
                microbatches=lengths.response * math.ceil(num_prompts * num_samples / num_rows),
            ),
        ),
    )


def _grow(cache: RowCache, lengths: Lengths, profiler: PassProfiler) -> None:
    for length in range(lengths.prompt, lengths.total - 1, _GROWTH_TOKENS):
        cache.lengths = [length] * len(cache.lengths)
        with profiler.attribute_to(CACHE):
            cache.advance(len(cache.lengths))


def _draw(model: LanguageModel, hidden: Tensor, config: PPOConfig) -> None:
    rows = torch.zeros(hidden.shape[0], dtype=torch.long)
    ending = torch.zeros(1, dtype=torch.long)
    sample(model.head.logits(hidden), streams=rows, positions=rows, options=sampling_options(config), ending_ids=ending)
