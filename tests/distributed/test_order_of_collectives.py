"""Ranks meet in one order of collectives, which follows from the models, whatever share of the work each has."""

import gc
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distributed.ranks import Ranks
from proximo.trainer_kinds import recipe_kind
from tiny_runs import LORA, Kind, changed, make_inputs, recipe_of

STEPS = 2
OF_MODELS = ("_allgather_base_", "_reduce_scatter_base_", "allreduce_")
FULL = {"devices.shard": "full", "run.evaluate_every_steps": None}
TWO_LAYERS = {"model.config.num_hidden_layers": 2}
ONE_PROMPT = FULL | {"ppo.prompts_per_step": 1, "ppo.minibatch_responses": 1}
FULL_KL = {"ppo.kl": {"estimator": "full", "kind": "loss", "coefficient": 0.1}}
SHARED_BASE = {"model.lora": LORA, "value": {"lora": LORA}, "reward.0.share_base": True}
CASES: dict[str, tuple[Kind, dict[str, Any]]] = {
    "ppo": ("ppo", ONE_PROMPT | TWO_LAYERS),
    "gathered for an update, frozen layers, full kl, an average": (
        "ppo",
        ONE_PROMPT
        | TWO_LAYERS
        | FULL_KL
        | {"devices.shard": "grads", "model.frozen_layers": 1, "ppo.average_decay": 0.9},
    ),
    "one trunk, bf16, checkpointed layers": (
        "ppo",
        ONE_PROMPT
        | TWO_LAYERS
        | {"run.precision": "bf16", "model.activation_checkpointing": True}
        | {"value": {"init_from": "trunk"}, "ppo.critic_warmup_steps": 1},
    ),
    "one base": ("ppo", ONE_PROMPT | SHARED_BASE),
    "online dpo": (
        "ppo",
        ONE_PROMPT
        | TWO_LAYERS
        | {
            "ppo.responses_per_prompt": 2,
            "ppo.minibatch_responses": 2,
            "ppo.policy_loss": {"objective": "online_dpo"},
        },
    ),
    "dpo": ("dpo", FULL | TWO_LAYERS | {"dpo.pairs_per_step": 1}),
    "reward": ("reward", FULL | TWO_LAYERS | {"reward.pairs_per_step": 1}),
}


class Order(TorchDispatchMode):
    """The collectives of this rank; those of models with the bytes that they bring together."""

    def __init__(self) -> None:
        super().__init__()
        self.met: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            tensors = tree_leaves(args) if name in OF_MODELS else []
            self.met.append((name, sum(each.nbytes for each in tensors if isinstance(each, Tensor))))
        return func(*args, **(kwargs or {}))


def num_remembered() -> int:
    """Passes through layers that FSDP keeps of all models made since `gc.freeze()`."""
    gc.collect()
    contexts = (vars(each) for each in gc.get_objects() if isinstance(each, FSDPCommContext))
    # A model that has not run yet has no list.
    return sum(len(each["post_forward_order"]) for each in contexts if "all_gather_stream" in each)


def steps_of(case: str, place: Path) -> tuple[list[tuple[str, int]], list[int]]:
    """The collectives of a few steps and evaluations, and what FSDP remembers after each."""
    kind, changes = CASES[case]
    trainer = recipe_kind(kind)
    gc.freeze()  # so that no look walks over what was imported
    task: Any = trainer.build(trainer.schema.model_validate(changed(recipe_of(kind, place), changes)))
    remembered = []
    with Order() as order:
        for step in range(1, STEPS + 1):
            task.step(step)
            task.evaluate()
            remembered.append(num_remembered())
    task.close()
    gc.unfreeze()
    return order.met, remembered


@pytest.mark.parametrize("case", CASES)
def test_ranks_of_unequal_shares_meet_in_one_order(two: Ranks, case: str, tmp_path: Path) -> None:
    """In each step a rank has no prompt, or no pair. The deadline of the ranks ends the test where they do not meet."""
    (first, _), *others = found = two.run(steps_of, case, make_inputs(tmp_path))
    assert sum(name == "_allgather_base_" for name, _ in first) > 6 * STEPS
    for order, _ in others:
        assert order == first
    for _, remembered in found:
        assert remembered == [0] * STEPS
