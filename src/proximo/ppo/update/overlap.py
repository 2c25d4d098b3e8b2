"""Decides whether policy and critic are updated concurrently, and for how many updates.

The threads: models/cpu/thread_split.py.
"""

from proximo.config.ppo.options import PPOConfig
from proximo.models.cpu.thread_split import can_split_threads, has_peer
from proximo.models.language import LanguageModel
from proximo.models.scalar import ScalarModel
from proximo.records import Experience

BOTH_UPDATES = ("train_policy", "train_value")
"""The calls that may run concurrently."""

MOST_WEIGHTS = 100_000_000
"""Of a model that is updated beside another one. On two threads concurrent updates took 0.88 to 0.95 of the time of
successive ones with 4 million weights, 0.94 to 1.0 with 33 million, and 1.06 (and 2.9 GiB more) with 494 million."""


def overlaps_updates(
    config: PPOConfig,
    *,
    device: str,
    shares_trunk: bool,
    compiled: bool = False,
    quantised: bool = False,
    own_optimizers: bool = False,
    num_weights: int = 0,
    num_threads: int | None = None,
) -> bool:
    """Whether the updates of policy and critic run concurrently: it is configured, and they share no state.

    Excluded are: a shared trunk, which is one model; torch.compile and quantised bases, whose internal state is not
    thread-safe; custom optimizers, which may draw from torch's global generator in an order that differs between runs;
    `in_backward`, whose purpose is to save memory, which concurrent updates need more of; and models of more than
    `MOST_WEIGHTS`, whose products keep all threads busy, so that nothing is gained for the memory of a second update.
    `num_weights`: of the larger of the two models, its base included. `num_threads`: None for torch's setting.
    """
    in_backward = any(options and options.in_backward for options in (config.policy_optimizer, config.value_optimizer))
    excluded = shares_trunk or compiled or quantised or own_optimizers or in_backward or not config.uses_critic
    excluded = excluded or num_weights > MOST_WEIGHTS
    return config.overlap_updates and not excluded and can_split_threads(device, num_threads=num_threads)


ALL_THREADS_SPEEDUP = 1.6
"""Speed-up of an update with all threads over one with half of them: 1.55 to 1.69 on two threads, 4 million weights."""


def num_overlapped_updates(
    num_updates: int,
    own: LanguageModel | ScalarModel | None,
    other: LanguageModel | ScalarModel | None,
    experience: Experience,
) -> int:
    """Number of updates that a model takes concurrently with the other model, with half of the threads each.

    It takes the rest after the other has finished, with all threads. Returns all updates if nothing runs concurrently.
    The number depends only on batch and models: if timing decided which updates get more threads, runs would not be
    bit-reproducible.
    """
    if own is None or other is None or not has_peer():
        return num_updates
    return best_split(num_updates, cost_of_updates(own, experience), cost_of_updates(other, experience))


def best_split(num_updates: int, own: float, other: float) -> int:
    """Number of concurrent updates that minimises the total time, from the costs of one update of each model.

    The cheaper model always takes all its updates concurrently. Costs may be in any unit."""
    if own <= other:
        return num_updates

    def cost(beside: int) -> float:
        return max(beside * own, num_updates * other) + (num_updates - beside) * own / ALL_THREADS_SPEEDUP

    return min(range(num_updates, -1, -1), key=cost)


def cost_of_updates(model: LanguageModel | ScalarModel, experience: Experience) -> int:
    """Multiplications of an epoch of updates.

    Counts a forward pass, gradients of inputs, gradients of trained matrices, and a second forward pass for
    checkpointed layers. The output layer processes response tokens only, and its forward pass is also computed twice.
    Each response counts with its prompt, as if none were shared.
    """
    layers = model.backbone.layers
    embedding = {id(weight) for weight in layers.get_input_embeddings().parameters()}
    matrices = [weight for weight in layers.parameters() if weight.dim() > 1 and id(weight) not in embedding]
    passes = 2 + any(getattr(module, "gradient_checkpointing", False) for module in layers.modules())
    per_token = sum(weight.numel() * (passes + weight.requires_grad) for weight in matrices)
    num_tokens = sum(len(s.response.prompt.token_ids) for s in experience.scored) + sum(experience.lengths)
    head = 0
    if isinstance(model, LanguageModel):
        head = model.head.weight.numel() * (3 + model.head.weight.requires_grad) * sum(experience.lengths)
    return per_token * num_tokens + head


def num_weights(*models: LanguageModel | ScalarModel | None) -> int:
    """Weights of the largest of some models."""
    return max(sum(weight.numel() for weight in model.model.parameters()) for model in models if model is not None)
