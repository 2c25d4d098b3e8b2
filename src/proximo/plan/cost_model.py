"""Estimates memory and FLOPs of a pass by running its code on fake tensors. Which passes a trainer has: its plan.py.

Call these functions inside `shapes_only()`. Every sequence is assumed to have the maximum length.
"""

import math
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from proximo.models.attention.cache import PromptCache
from proximo.models.heads import full_divergence, token_logprobs
from proximo.models.language import LanguageModel
from proximo.models.packing import PackedResponses, pack, pack_responses, plan_shares
from proximo.models.precision.compute import casting
from proximo.models.scalar import ScalarModel
from proximo.plan.fake_tensor_profiler import GRADIENTS, Cost, PassProfiler
from proximo.rollout.local import rows_for
from proximo.rollout.sampling import SamplingOptions, sample

Model = LanguageModel | ScalarModel
CACHE = "KV cache"
LOGITS = "logits"
COPY = "bf16 copy"
_GROWTH_TOKENS = 16
"""The KV cache of a rollout is grown in steps of this many tokens, to find its memory peak."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Prompt and response length of one sequence, in tokens.

    A text without a prompt counts its first token as the prompt.
    """

    prompt: int
    response: int

    @property
    def total(self) -> int:
        """Tokens of prompt and response."""
        return self.prompt + self.response


@dataclass(frozen=True, kw_only=True, slots=True)
class Batches:
    """Micro-batches of one rank, of sequences that all have the same lengths."""

    lengths: Lengths
    groups: tuple[tuple[int, ...], ...]
    """For each micro-batch the number of sequences that belong to each of its prompts."""

    @classmethod
    def of(
        cls,
        lengths: Lengths,
        count: int,
        *,
        token_budget: int,
        sequences_per_row: int = 1,
        responses_per_prompt: int = 1,
        num_ranks: int = 1,
    ) -> "Batches":
        """Micro-batches of the first rank, which has the most, for `count` rows of the data.

        The `sequences_per_row` sequences of a row share a micro-batch (2 for preference pairs), but no prompt.
        `responses_per_prompt`: rows that follow one another and share a prompt.
        """
        prompts = [row // responses_per_prompt for row in range(count)]
        plan = plan_shares(
            [lengths.total * sequences_per_row] * count,
            token_budget=token_budget,
            num_ranks=num_ranks,
            prefixes=[(prompt,) * (lengths.prompt - 1) for prompt in prompts] if responses_per_prompt > 1 else (),
        )[0]
        if responses_per_prompt == 1:
            return cls(lengths=lengths, groups=tuple((1,) * (len(batch) * sequences_per_row) for batch in plan))
        return cls(lengths=lengths, groups=tuple(tuple(Counter(prompts[i] for i in batch).values()) for batch in plan))

    @property
    def max_tokens(self) -> int:
        """Tokens that are computed in the largest micro-batch."""
        return max(map(self._tokens, self.groups))

    @property
    def total_tokens(self) -> int:
        """Tokens that are computed in all micro-batches."""
        return sum(map(self._tokens, self.groups))

    @property
    def computed_fraction(self) -> float:
        """Tokens that are computed, divided by those of prompts and responses: below 1 if responses share prompts."""
        return self.total_tokens / (sum(map(sum, self.groups)) * self.lengths.total)

    def _tokens(self, groups: Sequence[int]) -> int:
        return sum(count * self.lengths.total - (count - 1) * (self.lengths.prompt - 1) for count in groups)

    def largest(self) -> PackedResponses:
        """The largest micro-batch, packed, with dummy token ids."""
        groups = max(self.groups, key=self._tokens)
        # The first token tells prompts apart.
        prompts = [[i, *[0] * (self.lengths.prompt - 1)] for i, count in enumerate(groups) for _ in range(count)]
        return pack_responses(prompts, [[0] * self.lengths.response] * len(prompts))


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """Passes of a phase in one step, for the bytes that a rank gathers in them."""

    kind: Literal["train", "read", "rollout"]
    modules: tuple[nn.Module, ...]
    """The modules that run in these passes."""
    microbatches: int
    """Micro-batches of each update or reading call; of a rollout, the decoding steps, one token of each row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """Memory and work of one phase of a step."""

    parts: Mapping[str, int]
    """Part -> bytes at the phase's peak, without static memory (weights and optimizer state)."""
    flops: int
    """Floating-point operations of all passes of this phase in one step."""
    tokens: int
    """Tokens that these passes process."""
    heap: int
    """Bytes of the peak in small heap blocks, see `Cost.heap`."""
    passes: tuple[Passes, ...]


def reading_cost(cost: Cost, modules: Sequence[nn.Module], batches: Batches, *, tokens: int | None = None) -> StepCost:
    """The cost of reading `tokens` tokens in a step (None: those of `batches`), by that of the largest micro-batch.

    The FLOPs are scaled, memory is not.
    """
    tokens = tokens or batches.total_tokens
    return StepCost(
        parts=cost.parts,
        flops=cost.flops * tokens // batches.max_tokens,
        tokens=tokens,
        heap=cost.heap,
        passes=(Passes(kind="read", modules=tuple(modules), microbatches=len(batches.groups)),),
    )


def sequential_cost(costs: Sequence[StepCost]) -> StepCost:
    """Cost of passes that run in sequence: the largest of their peaks, the sum of their FLOPs and tokens."""
    largest = max(costs, key=lambda cost: sum(cost.parts.values()))
    passes = tuple(each for cost in costs for each in cost.passes)
    return replace(largest, flops=sum(c.flops for c in costs), tokens=sum(c.tokens for c in costs), passes=passes)


def concurrent_costs(costs: Mapping[str, StepCost]) -> dict[str, StepCost]:
    """Cost of phases that run concurrently: each gets the summed memory, since their peaks may coincide."""
    parts = sum((Counter(cost.parts) for cost in costs.values()), Counter())
    heap = sum(cost.heap for cost in costs.values())
    return {name: replace(cost, parts=dict(parts), heap=heap) for name, cost in costs.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPass:
    """Micro-batches of an update that share one loss."""

    loss: Callable[[PassProfiler, PackedResponses], Tensor]
    batches: Batches
    tokens: int
    """Tokens trained with this loss in one step, over all updates."""


Units = Sequence[tuple[Sequence[nn.Parameter], int]]
"""Parameters whose gradients leave them together when all are complete, and the bytes that are kept of these."""


def training_cost(
    modules: Sequence[nn.Module],
    passes: Sequence[TrainingPass],
    *,
    in_backward: bool = False,
    reduced: Units | None = None,
) -> StepCost:
    """Cost of the forward and backward passes that train the modules.

    `in_backward`: the optimizer steps inside the backward pass, so each gradient is freed as soon as it is computed.
    `reduced`: what becomes of gradients of sharded models; None for models that are whole.
    """
    learner, profiler, flops = nn.ModuleList(modules), PassProfiler(modules), 0
    learner.train()
    if reduced is None:
        reduced = [([p], 0) for p in learner.parameters() if p.requires_grad] if in_backward else []
    with profiler, casting(frees=in_backward), _reduced_gradients(profiler, reduced):
        for training_pass in passes:
            batches, flops_before = training_pass.batches, profiler.flops
            # The peak is in the second micro-batch, if there is one: it starts with all accumulated gradients in
            # memory.
            batch, rounds = batches.largest(), min(2, len(batches.groups))
            for _ in range(rounds):
                training_pass.loss(profiler, batch).backward()
            flops += (profiler.flops - flops_before) * training_pass.tokens // (rounds * batches.max_tokens)
    learner.eval()
    for parameter in learner.parameters():
        parameter.grad = None
    cost = profiler.cost()
    return StepCost(
        parts=cost.parts,
        flops=flops,
        tokens=sum(p.tokens for p in passes),
        heap=cost.heap,
        passes=(
            Passes(
                kind="train",
                modules=tuple(modules),
                microbatches=sum(len(p.batches.groups) for p in passes),
            ),
        ),
    )


@contextmanager
def _reduced_gradients(profiler: PassProfiler, units: Units) -> Generator[None]:
    """Free the gradients of a unit when they are complete, and count what is kept of them, once."""
    handles, seen = [], set[int]()

    def watch(unit: Sequence[nn.Parameter], kept: int) -> None:
        missing = {id(parameter) for parameter in unit}

        def reduce(parameter: Tensor) -> None:
            missing.discard(id(parameter))
            if missing:
                return
            for each in unit:
                each.grad = None
            missing.update(id(each) for each in unit)
            if id(unit) not in seen:
                seen.add(id(unit))
                profiler.hold(GRADIENTS, kept)

        handles.extend(parameter.register_post_accumulate_grad_hook(reduce) for parameter in unit)

    for unit, kept in units:
        watch(unit, kept)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def likelihood_loss(model: LanguageModel) -> Callable[[PassProfiler, PackedResponses], Tensor]:
    """The loss of fine-tuning on responses, for the profiler."""

    def loss(profiler: PassProfiler, batch: PackedResponses) -> Tensor:
        hidden = model.hidden_states(batch.packed, batch.predictors)
        with profiler.attribute_to(LOGITS):
            return token_logprobs(hidden, model.head, batch.targets).logprobs.sum()

    return loss


def score_loss(model: ScalarModel) -> Callable[[PassProfiler, PackedResponses], Tensor]:
    """The loss of a value or reward model with one score per token, for the profiler."""
    return lambda _, batch: model.token_scores(batch.packed, batch.predictors).sum()


@torch.no_grad()
def inference_cost(
    model: Model, batches: Batches, *, full_kl_with: LanguageModel | None = None, tokens: int | None = None
) -> StepCost:
    """Cost of a pass without gradients that computes log-probs or scores.

    `full_kl_with`: the model whose full KL is computed in the same pass. `tokens`: tokens per step that take this pass;
    None for the tokens of `batches`.
    """
    batch = batches.largest()
    modules = [model.model] if full_kl_with in (None, model) else [model.model, full_kl_with.model]
    with PassProfiler(modules) as profiler:
        if isinstance(model, ScalarModel):
            model.token_scores(batch.packed, batch.predictors)
        else:
            hidden = model.hidden_states(batch.packed, batch.predictors)
            other = None if full_kl_with is None else full_kl_with.hidden_states(batch.packed, batch.predictors)
            with profiler.attribute_to(LOGITS):
                token_logprobs(hidden, model.head, batch.targets)
                if full_kl_with is not None and other is not None:
                    full_divergence(other, full_kl_with.head, hidden, model.head)
    return reading_cost(profiler.cost(), modules, batches, tokens=tokens)


@torch.no_grad()
def rollout_cost(
    policy: LanguageModel,
    lengths: Lengths,
    options: SamplingOptions,
    *,
    num_prompts: int,
    num_samples: int,
    max_num_seqs: int,
) -> StepCost:
    """Cost of sampling `num_samples` responses to each prompt: prefill, growth of the KV cache, sampling of a token.

    Profiles one batch of rows and scales the FLOPs to all. FLOPs of decoding are counted at half of the response, the
    mean.
    """
    num_rows = min(max_num_seqs, num_prompts * num_samples)
    fitting = policy.backbone.path.prefill_tokens // lengths.prompt
    num_prefilled = max(1, min(num_prompts, math.ceil(num_rows / num_samples), fitting))
    with PassProfiler([policy.model]) as profiler, casting():
        with profiler.attribute_to(COPY):
            policy.backbone.cast_weights()
        cache = rows_for(policy, lengths.prompt, num_rows=num_rows, max_new_tokens=lengths.response)
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
            cache.place(prompts, 0, [0])  # allocates all rows; copies into the others take no more
        del hidden, prompts
        for length in range(lengths.prompt, lengths.total - 1, _GROWTH_TOKENS):
            cache.lengths = [length] * num_rows
            with profiler.attribute_to(CACHE):
                cache.advance(num_rows)
        decoder = policy.decoder()
        # The last token has the highest peak; the token in the middle of the response has the mean FLOPs.
        for length in (lengths.total - 1, lengths.prompt + lengths.response // 2):
            profiler.flops = 0
            cache.lengths = [length - 1] * num_rows
            with profiler.attribute_to(CACHE):
                layout = cache.advance(num_rows)
            hidden = decoder(torch.zeros(num_rows, dtype=torch.long), layout.positions, cache, layout)
            with profiler.attribute_to(LOGITS):
                _draw(policy, hidden, options)
    cost = profiler.cost()
    decoded = num_prompts * num_samples * lengths.response
    num_passes = lengths.response * math.ceil(num_prompts * num_samples / num_rows)
    return StepCost(
        parts=cost.parts,
        flops=prefill_flops * num_prompts // num_prefilled + cost.flops * decoded // num_rows,
        tokens=num_prompts * lengths.prompt + decoded,
        heap=cost.heap,
        passes=(Passes(kind="rollout", modules=(policy.model,), microbatches=num_passes),),
    )


def _draw(model: LanguageModel, hidden: Tensor, options: SamplingOptions) -> None:
    rows, ending = torch.zeros(hidden.shape[0], dtype=torch.long), torch.zeros(1, dtype=torch.long)
    sample(model.head.logits(hidden), streams=rows, positions=rows, options=options, ending_ids=ending)
