"""What each pass of a run would hold and compute, rehearsed with the code that runs it. Not which passes there are.

To be called inside `shapes_only()`. Every sequence has its greatest length.
"""

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from proximo.models.batching import plan_batches
from proximo.models.fake_tensor_profiler import Cost, Rehearsal
from proximo.models.heads import full_kl, token_logprobs
from proximo.models.language import LanguageModel
from proximo.models.packing import PackedResponses, pack_responses
from proximo.models.precision.compute import casting
from proximo.models.scalar import ScalarModel

Model = LanguageModel | ScalarModel
CACHE = "KV cache"
LOGITS = "logits"
COPY = "bf16 copy"


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


def in_step(cost: Cost, *, rehearsed: int, tokens: int) -> StepCost:
    """The cost of a pass over `rehearsed` tokens, of which a step makes so many that they are `tokens`."""
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
    return in_step(rehearsal.cost(), rehearsed=batches.tokens, tokens=tokens or batches.all_tokens)
