"""What a run in bf16 holds of its frozen roles, and what its plan says of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from proximo.plan.profiling import make_plans
from proximo.ppo import from_recipe
from proximo.ppo.recipe import PPORecipe
from proximo.rewards.model import ModelReward
from proximo.trainer_kinds import recipe_kind
from tiny_runs import changed, recipe_of

BF16 = {"run.precision": "bf16"}


def types(model: nn.Module) -> set[torch.dtype]:
    return {parameter.dtype for parameter in model.parameters()}


def models_of(inputs: Path, changes: dict[str, Any]) -> dict[str, nn.Module]:
    task = from_recipe.build_task(PPORecipe.model_validate(changed(recipe_of("ppo", inputs), changes)))
    roles = task.ppo.roles
    (reward,) = (source for _, source in task.reward.sources if isinstance(source, ModelReward))
    return {
        "policy": roles.policy.model.model,
        "value": roles.value.model.model,
        "reference": roles.reference.model.model,
        "reward": reward.model.model,
    }


MOVES = {"ppo.kl.reference_every_steps": 2, "ppo.kl.reference_decay": 0.9}


@pytest.mark.parametrize(
    ("changes", "narrow"), [(BF16, {"reference", "reward"}), ({}, set()), (BF16 | MOVES, {"reward"})]
)
def test_frozen_roles_are_bf16_and_those_that_train_or_move_float32(
    changes: dict[str, Any], narrow: set[str], inputs: Path
) -> None:
    found = {role: types(model) for role, model in models_of(inputs, changes).items()}
    assert {role for role, kinds in found.items() if torch.bfloat16 in kinds} == narrow
    assert all(kinds == {torch.float32} for role, kinds in found.items() if role not in narrow)


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_the_reference_of_those_that_do_not_sample_is_bf16(kind: Any, inputs: Path) -> None:
    task = recipe_kind(kind).build(recipe_kind(kind).schema.model_validate(changed(recipe_of(kind, inputs), BF16)))
    assert torch.bfloat16 in types(task.reference.model)
    assert types(task.model.model) == {torch.float32}


def test_the_plan_counts_the_half(inputs: Path) -> None:
    def weights(changes: dict[str, Any]) -> dict[str, int]:
        (plan,) = make_plans(PPORecipe.model_validate(changed(recipe_of("ppo", inputs), changes)))
        return {name: plan.largest.parts_bytes[f"{name} weights"] for name in ("policy", "reference", "reward_model")}

    whole, half = weights({}), weights(BF16)
    assert half["policy"] == whole["policy"]
    # Matrices at half their size, the embedding and the norms at all of it.
    assert 0.5 * whole["reference"] < half["reference"] < 0.8 * whole["reference"]
    assert 0.5 * whole["reward_model"] < half["reward_model"] < 0.9 * whole["reward_model"]
