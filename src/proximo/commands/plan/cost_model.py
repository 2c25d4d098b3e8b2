"""What each pass of a run would hold and compute, rehearsed with the code that runs it. Not which passes there are.

To be called inside `shapes_only()`. Every sequence has its greatest length.
"""

import math
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from proximo.config.ppo.options import PPOConfig
from proximo.models.attention.cache import PromptCache, RowCache
from proximo.models.batching import plan_batches
from proximo.models.fake_tensor_profiler import Cost, Rehearsal
from proximo.models.heads import full_kl, token_logprobs
from proximo.models.language import LanguageModel
from proximo.models.packing import PackedResponses, pack, pack_responses
from proximo.models.precision.compute import casting
from proximo.models.scalar import ScalarModel
from proximo.ppo.roles.inference import sampling_options
from proximo.rollout.local import PREFILL_TOKENS, rows_for
from proximo.rollout.sampling import sample

Model = LanguageModel | ScalarModel
CACHE = "KV cache"
LOGITS = "logits"
COPY = "bf16 copy"
_GROWTH_TOKENS = 16
"""The rows of a rollout are looked at after every so many new tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Tokens of one sequence; without a prompt, all but the first are targets."""

    prompt: int
    response: int

    @property
    def total(self) -> int:
        """Of both."""
        return self.prompt + self.response


@dataclass(frozen=True, kw_only=True, slots=True)
class Batches:
    """How some sequences of one length go through a model."""

    lengths: Lengths
    sizes: tuple[int, ...]
    """Sequences of each micro-batch."""

    @classmethod
    def of(cls, lengths: Lengths, count: int, *, token_budget: int, sequences_each: int = 1) -> "Batches":
        """`count` units of `sequences_each` sequences, which stay together (the two answers of a pair)."""
        plan = plan_batches([lengths.total * sequences_each] * count, token_budget=token_budget)
        return cls(lengths=lengths, sizes=tuple(len(batch) * sequences_each for batch in plan))

    @property
    def tokens(self) -> int:
        """Of the largest micro-batch."""
        return max(self.sizes) * self.lengths.total

    @property
    def all_tokens(self) -> int:
        """Of all micro-batches."""
        return sum(self.sizes) * self.lengths.total

    def largest(self) -> PackedResponses:
        """The largest micro-batch, packed."""
        count = max(self.sizes)
        return pack_responses([[0] * self.lengths.prompt] * count, [[0] * self.lengths.response] * count)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """What one phase of a step needs."""

    parts: Mapping[str, int]
    """Bytes by part at the moment when most is held, without what is held in every phase."""
    flops: int
    """In all passes of the step."""
    tokens: int
    """Read or written by them."""
    heap: int
    """See `Cost.heap`."""


def _in_step(cost: Cost, *, rehearsed: int, tokens: int) -> StepCost:
    return StepCost(parts=cost.parts, flops=cost.flops * tokens // rehearsed, tokens=tokens, heap=cost.heap)


def one_after_the_other(costs: Sequence[StepCost]) -> StepCost:
    """The memory of the one that needs most, the work of all."""
    largest = max(costs, key=lambda cost: sum(cost.parts.values()))
    return replace(largest, flops=sum(c.flops for c in costs), tokens=sum(c.tokens for c in costs))


def at_the_same_time(costs: Mapping[str, StepCost]) -> dict[str, StepCost]:
    """Each with the memory of all, and its own work: what each holds most of may be held in one moment."""
    parts = sum((Counter(cost.parts) for cost in costs.values()), Counter())
    heap = sum(cost.heap for cost in costs.values())
    return {name: replace(cost, parts=dict(parts), heap=heap) for name, cost in costs.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Lesson:
    """Micro-batches of one kind in an update."""

    loss: Callable[[Rehearsal, PackedResponses], Tensor]
    batches: Batches
    tokens: int
    """That a step trains on in this way, in all its updates."""


def training(modules: Sequence[nn.Module], lessons: Sequence[Lesson], *, in_backward: bool = False) -> StepCost:
    """The gradients of an update of the modules. `in_backward`: each is freed as soon as it is there.

    Where there are several micro-batches the second one begins with all gradients held.
    """
    learner, flops = nn.ModuleList(modules), 0
    learner.train()
    with Rehearsal(modules) as rehearsal, casting(), _freed(learner) if in_backward else nullcontext():
        for lesson in lessons:
            batch, rounds, before = lesson.batches.largest(), min(2, len(lesson.batches.sizes)), rehearsal.flops
            for _ in range(rounds):
                lesson.loss(rehearsal, batch).backward()
            flops += (rehearsal.flops - before) * lesson.tokens // (rounds * lesson.batches.tokens)
    learner.eval()
    for parameter in learner.parameters():
        parameter.grad = None
    cost = rehearsal.cost()
    return StepCost(parts=cost.parts, flops=flops, tokens=sum(lesson.tokens for lesson in lessons), heap=cost.heap)


@contextmanager
def _freed(module: nn.Module) -> Generator[None]:
    """As learner/update.py does it, without the step."""

    def free(parameter: Tensor) -> None:
        parameter.grad = None

    handles = [p.register_post_accumulate_grad_hook(free) for p in module.parameters() if p.requires_grad]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


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


def likelihood_loss(model: LanguageModel) -> Callable[[Rehearsal, PackedResponses], Tensor]:
    """Of fine-tuning."""

    def loss(rehearsal: Rehearsal, batch: PackedResponses) -> Tensor:
        hidden = model.hidden_states(batch.packed, batch.predictors)
        with rehearsal.making(LOGITS):
            return token_logprobs(hidden, model.head, batch.targets).logprobs.sum()

    return loss


def score_loss(model: ScalarModel) -> Callable[[Rehearsal, PackedResponses], Tensor]:
    """Of a value or reward model: a number for each token."""
    return lambda _, batch: model.token_scores(batch.packed, batch.predictors).sum()


@torch.no_grad()
def reading(
    model: Model, batches: Batches, *, also: LanguageModel | None = None, tokens: int | None = None
) -> StepCost:
    """A pass without gradients: log-probs or scores. `also`: a second model, for the KL over all tokens.

    `tokens`: that a step reads in this way; None for those of the batches.
    """
    batch = batches.largest()
    with Rehearsal([model.model] if also in (None, model) else [model.model, also.model]) as rehearsal:
        if isinstance(model, ScalarModel):
            model.token_scores(batch.packed, batch.predictors)
        else:
            hidden = model.hidden_states(batch.packed, batch.predictors)
            others = None if also is None else also.hidden_states(batch.packed, batch.predictors)
            with rehearsal.making(LOGITS):
                token_logprobs(hidden, model.head, batch.targets)
                if also is not None and others is not None:
                    full_kl(others, also.head, hidden, model.head)
    return _in_step(rehearsal.cost(), rehearsed=batches.tokens, tokens=tokens or batches.all_tokens)


@torch.no_grad()
def reading_both(policy: LanguageModel, value: ScalarModel, batches: Batches) -> StepCost:
    """Log-probs and values by one pass through the trunk that they share."""
    batch = batches.largest()
    with Rehearsal([policy.model]) as rehearsal:
        hidden = policy.hidden_states(batch.packed)
        with rehearsal.making(LOGITS):
            token_logprobs(hidden[batch.predictors], policy.head, batch.targets)
        value.scores(hidden[batch.value_positions])
    return _in_step(rehearsal.cost(), rehearsed=batches.tokens, tokens=batches.all_tokens)


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
