"""Optimizers and schedules that a library user brings: used as they are, saved and resumed, or refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from builders import tiny_language_model, tiny_tokenizer
from ppo_trainers import PROMPTS, count_a
from proximo.checkpoint.store import CheckpointStore
from proximo.config.ppo.options import PPOConfig
from proximo.errors import ConfigError
from proximo.learner.optimizers import OwnOptimizer
from proximo.ppo.step_arguments import as_prompts
from proximo.ppo.task import PPOTask
from proximo.ppo.trainer import PPOTrainer
from proximo.rewards.function import FunctionReward

Make = Callable[[list[nn.Parameter]], Any]


def trainer(own: dict[str, Any] | None = None, **options: Any) -> PPOTrainer:
    """Two updates a step, for four steps."""
    base = {"num_steps": 4, "prompts_per_step": 4, "epochs_per_step": 1, "minibatch_responses": 2}
    config = PPOConfig(**(base | {"rollout": {"max_new_tokens": 4}} | options))
    return PPOTrainer(tiny_language_model(), tiny_tokenizer(), config=config, optimizers=own)


def weights(made: PPOTrainer) -> dict[str, torch.Tensor]:
    return {
        f"{role}.{name}": parameter.detach().clone()
        for role, learner in made.learners.items()
        for name, parameter in learner.parameters.items()
    }


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_the_adamw_that_recipes_use_brought_by_hand_gives_the_same_bits() -> None:
    configured = trainer(
        policy_optimizer={"learning_rate": 1e-2, "schedule": "linear"}, value_optimizer={"learning_rate": 3e-2}
    )
    own = {
        "policy": OwnOptimizer(
            make=lambda parameters: AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), weight_decay=0, fused=True),
            schedule=lambda update, num_updates: 1 - update / num_updates,
        ),
        "value": OwnOptimizer(make=lambda ps: AdamW(ps, lr=3e-2, betas=(0.9, 0.95), weight_decay=0, fused=True)),
    }
    brought = trainer(own)
    start = weights(brought)
    lines = [made.train(PROMPTS, reward=count_a) for made in (configured, brought)]
    assert [line["policy/learning_rate"] for line in lines[0]] == [line["policy/learning_rate"] for line in lines[1]]
    assert same(weights(configured), weights(brought))
    assert not same(weights(brought), start)


def test_the_schedule_is_asked_for_every_update_and_moves_every_group_by_its_factor() -> None:
    asked: list[tuple[int, int]] = []

    def schedule(update: int, num_updates: int) -> float:
        asked.append((update, num_updates))
        return 0.5**update

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        return SGD([{"params": parameters[:1], "lr": 0.4}, {"params": parameters[1:], "lr": 0.1}])

    made = trainer({"policy": OwnOptimizer(make=make, schedule=schedule)}, advantage="return_to_go", num_steps=2)
    made.train(PROMPTS, reward=count_a)
    assert asked == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert [group["lr"] for group in made.learners["policy"].optimizer.param_groups] == [0.4 / 8, 0.1 / 8]


def test_own_clipping() -> None:
    """Plain SGD moves the weights by rate times gradient: with a limit on the norm, by rate times that at most."""
    own = OwnOptimizer(make=lambda parameters: SGD(parameters, lr=2.0), max_gradient_norm=1e-3)
    made = trainer({"policy": own}, advantage="return_to_go", num_steps=1, minibatch_responses=4)
    before = weights(made)
    (line,) = made.train(PROMPTS, reward=count_a)
    assert line["policy/gradient_norm"] > 1e-2
    moved = torch.cat([(tensor - before[name]).flatten() for name, tensor in weights(made).items()]).norm()
    assert float(moved) == pytest.approx(2e-3, rel=1e-3)


def task(make: Make) -> PPOTask:
    own = OwnOptimizer(make=make, schedule=lambda update, num_updates: 1 / (1 + update))
    made = trainer({"policy": own, "value": own})
    reward = FunctionReward(count_a, name="a")
    made.roles.reward.source = reward
    options: dict[str, Any] = {"gold": None, "samples_per_step": 0, "inputs_fingerprint": {}}
    return PPOTask(made, as_prompts(made.tokenizer, PROMPTS), [], reward=reward, **options)


MAKES: dict[str, Make] = {
    "momentum": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9),
    "sums over rows and columns": lambda parameters: Adafactor(parameters, lr=0.05),
}


@pytest.mark.parametrize("kind", MAKES)
def test_a_resumed_run_goes_on_with_the_optimizers_state(kind: str, tmp_path: Path) -> None:
    whole = task(MAKES[kind])
    for step in (1, 2):
        whole.step(step)
    CheckpointStore(tmp_path).save(2, whole.writers(), {"task": dict(whole.state())})
    for step in (3, 4):
        whole.step(step)
    resumed = task(MAKES[kind])
    resumed.restore(CheckpointStore(tmp_path).load())
    for step in (3, 4):
        resumed.step(step)
    assert same(weights(whole.ppo), weights(resumed.ppo))


def plain(parameters: list[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=0.1)


class Rateless(SGD):
    """An optimizer that finds its own rate."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.1)
        for group in self.param_groups:
            group["lr"] = None


@pytest.mark.parametrize(
    ("own", "options", "reason"),
    [
        ({"policy": plain}, {}, "mapping from roles to their OwnOptimizer.*got {'policy': <function"),
        ({"critic": OwnOptimizer(make=plain)}, {}, "an entry 'critic', but the trained models are policy and value"),
        (
            {"value": OwnOptimizer(make=plain)},
            {"advantage": "return_to_go"},
            "an entry 'value', but the trained models are policy$",
        ),
        (
            {"policy": OwnOptimizer(make=plain)},
            {"policy_optimizer": {"learning_rate": 1e-3}},
            "the policy model has two optimizers",
        ),
        ({"policy": OwnOptimizer(make=lambda ps: ps)}, {}, "must return a torch.optim.Optimizer, it returned list"),
        (
            {"policy": OwnOptimizer(make=lambda ps: plain(ps[1:]))},
            {},
            r"holds 20 tensors, the model trains 21, and 1 of those are missing, such as lm_head|such as model.embed",
        ),
        (
            {"policy": OwnOptimizer(make=lambda ps: plain([*ps, nn.Parameter(torch.ones(1))]))},
            {},
            "holds 22 tensors, the model trains 21: give it all",
        ),
        ({"policy": OwnOptimizer(make=Rateless)}, {}, "needs a number as its learning rate"),
    ],
)
def test_what_does_not_fit_is_refused(own: dict[str, Any], options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        trainer(own, **options)


def test_an_optimizer_in_the_place_of_the_function_that_makes_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="make must be a function from a list of parameters.*got SGD"):
        OwnOptimizer(make=SGD([nn.Parameter(torch.ones(1))]))  # ty: ignore[invalid-argument-type]
