"""Whether policy and value model train at the same time, and how long. Not how: models/cpu/thread_split.py."""

from proximo.config.ppo.options import PPOConfig
from proximo.models.cpu.thread_split import can_split_threads, has_peer
from proximo.models.language import LanguageModel
from proximo.models.scalar import ScalarModel
from proximo.records import Experience

BOTH_UPDATES = ("train_policy", "train_value")
"""The calls that may then run side by side."""


def trains_side_by_side(
    config: PPOConfig,
    *,
    device: str,
    shares_trunk: bool,
    compiled: bool = False,
    quantised: bool = False,
    own_optimizers: bool = False,
    num_threads: int | None = None,
) -> bool:
    """True where it is asked for, and nothing that both updates would touch stands against it.

    A shared trunk is one model. torch.compile and bases in few bits keep states that two threads would write. An
    optimizer that was brought may draw from torch's generator, in an order that would be another in each run. And who
    lets one step in the backward pass wants the memory more than the time.
    `num_threads`: None for torch's own.
    """
    in_backward = any(each and each.in_backward for each in (config.policy_optimizer, config.value_optimizer))
    alone = shares_trunk or compiled or quantised or own_optimizers or in_backward or not config.uses_critic
    return config.overlap_updates and not alone and can_split_threads(device, num_threads=num_threads)


SPEED_UP = 1.6
"""Of an update with all threads over one with half of them: on two threads 1.55 to 1.69 with 4 million weights."""


def updates_beside(
    num_updates: int,
    own: LanguageModel | ScalarModel | None,
    other: LanguageModel | ScalarModel | None,
    experience: Experience,
) -> int:
    """How many of its updates a model takes beside those of the other, with half of the threads; the rest it takes
    when the other has ended, with all of them. All, where nothing runs beside it.

    A function of batch and models alone: were it left to the clock which updates have more threads, no run could be
    repeated to the bit.
    """
    if own is None or other is None or not has_peer():
        return num_updates
    return best_split(num_updates, cost_of_updates(own, experience), cost_of_updates(other, experience))


def best_split(num_updates: int, own: float, other: float) -> int:
    """The same from the cost of an update of each, in any unit. Never less than all for the cheaper one."""
    if own <= other:
        return num_updates

    def cost(beside: int) -> float:
        return max(beside * own, num_updates * other) + (num_updates - beside) * own / SPEED_UP

    return min(range(num_updates, -1, -1), key=cost)


def cost_of_updates(model: LanguageModel | ScalarModel, experience: Experience) -> int:
    """Multiplications of an epoch: forward, for the inputs' gradients, and for those of the matrices that train; once
    more forward for layers that are checkpointed, and for the output layer, which works on response tokens alone."""
    layers = model.backbone.layers
    embedding = {id(each) for each in layers.get_input_embeddings().parameters()}
    matrices = [each for each in layers.parameters() if each.dim() > 1 and id(each) not in embedding]
    passes = 2 + any(getattr(each, "gradient_checkpointing", False) for each in layers.modules())
    per_token = sum(each.numel() * (passes + each.requires_grad) for each in matrices)
    num_tokens = sum(len(each.response.prompt.token_ids) for each in experience.scored) + sum(experience.lengths)
    head = 0
    if isinstance(model, LanguageModel):
        head = model.head.weight.numel() * (3 + model.head.weight.requires_grad) * sum(experience.lengths)
    return per_token * num_tokens + head
