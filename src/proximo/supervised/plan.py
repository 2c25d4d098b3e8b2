"""What an update of a supervised trainer costs, without weights. Not the update."""

from collections.abc import Callable, Mapping

from torch import Tensor

from proximo.models.fake_tensor_profiler import Rehearsal, rehearsable
from proximo.models.packing import PackedResponses
from proximo.plan.cost_model import Batches, Lesson, Model, StepCost, reading, training
from proximo.plan.stages import StageCosts, fitting_lengths
from proximo.supervised.task import SupervisedConfig


def plan_update(
    models: Mapping[str, Model],
    config: SupervisedConfig,
    loss: Callable[[Rehearsal, PackedResponses], Tensor],
    *,
    max_tokens: int,
    sequences_each: int,
) -> StageCosts:
    """The first model learns from units of so many sequences; all others read them before."""
    rehearsable(*(model.model for model in models.values()))
    lengths = fitting_lengths(models, prompt=1, response=max_tokens - 1)
    count, budget = config.rows_per_update, config.tokens_per_microbatch
    optimizer = config.optimizer
    update = Batches.of(lengths, count, token_budget=budget, sequences_each=sequences_each)
    (trained, learner), *others = models.items()
    lesson = Lesson(loss=loss, batches=update, tokens=sequences_each * count * lengths.total)
    costs: dict[str, StepCost] = {f"{role}_logprobs": reading(model, update) for role, model in others}
    costs["train"] = training([learner.model], [lesson], in_backward=optimizer.in_backward)
    return StageCosts(
        models=models,
        learning={trained: ([learner.model], optimizer)},
        costs=costs,
        update=update,
        token_budget=budget,
    )
