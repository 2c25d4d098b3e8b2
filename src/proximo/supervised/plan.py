"""Plans the update of a supervised trainer: the cost of its passes, computed without weights."""

from collections.abc import Callable, Mapping

from torch import Tensor

from proximo.models.fake_tensor_profiler import PassProfiler, to_fake_tensors
from proximo.models.packing import PackedResponses
from proximo.plan.cost_model import Batches, Model, StepCost, TrainingPass, inference_cost, training_cost
from proximo.plan.stages import StageContext, StageCosts, truncated_lengths
from proximo.supervised.task import SupervisedConfig


def plan_update(
    models: Mapping[str, Model],
    config: SupervisedConfig,
    loss: Callable[[PassProfiler, PackedResponses], Tensor],
    *,
    max_tokens: int,
    sequences_per_row: int,
    context: StageContext,
) -> StageCosts:
    """Costs of one update, on a rank. The first model is trained; before it, the others read the same rows.

    `sequences_per_row`: 2 for preference pairs, else 1.
    """
    to_fake_tensors(*(model.model for model in models.values()))
    layout = context.lay_out(models, lambda role: "reference" if role == "reference" else "model")
    lengths = truncated_lengths(models, prompt=1, response=max_tokens - 1)
    count, budget = config.rows_per_update, config.tokens_per_microbatch
    optimizer = config.optimizer
    update = Batches.of(
        lengths, count, token_budget=budget, sequences_per_row=sequences_per_row, num_ranks=context.ranks.num
    )
    (trained, learner), *others = models.items()
    tokens = sequences_per_row * context.ranks.share(count) * lengths.total
    training_pass = TrainingPass(loss=loss, batches=update, tokens=tokens)
    reduced = layout.reduced([learner.model], rounds=len(update.groups), in_backward=optimizer.in_backward)
    costs: dict[str, StepCost] = {f"{role}_logprobs": inference_cost(model, update) for role, model in others}
    costs["train"] = training_cost([learner.model], [training_pass], in_backward=optimizer.in_backward, reduced=reduced)
    return StageCosts(
        models=models,
        optimized={trained: ([learner.model], optimizer)},
        costs=costs,
        update=update,
        token_budget=budget,
        layout=layout,
    )
