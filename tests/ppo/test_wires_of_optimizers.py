"""Every setting of an optimizer reaches the step that it takes, by value, and that of the model whose section it is in.

Settings differ from each other and from their defaults; AdamW is written again with Python's floats.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from builders import tiny_language_model, tiny_tokenizer
from proximo.config.ppo.options import PPOConfig
from proximo.config.run import OptimizerConfig
from proximo.errors import TrainingError
from proximo.learner.optimizers import OptimizerOptions
from proximo.learner.update import Learner
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions
from proximo.ppo.trainer import PPOTrainer
from proximo.run.make.conversion import optimizer_options
from supervised.tiny_tasks import dpo_task, kto_task, labelled, reward_task, sft_task, two_models

FIRST: dict[str, Any] = {
    "learning_rate": 0.03,
    "betas": (0.6, 0.8),
    "eps": 0.3,
    "weight_decay": 0.4,
    "schedule": "cosine",
    "warmup_updates": 2,
    "final_fraction": 0.25,
    "max_gradient_norm": 1.5,
    "non_finite_gradient": "stop",
}
SECOND: dict[str, Any] = {
    "learning_rate": 0.07,
    "betas": (0.5, 0.7),
    "eps": 0.2,
    "weight_decay": 0.1,
    "schedule": "linear",
    "warmup_updates": 1,
    "final_fraction": 0.5,
    "max_gradient_norm": 2.5,
}
GRADIENTS = [(1.0, 2.0), (-3.0, 0.5), (0.25, -0.5), (2.0, 2.0), (0.5, 1.0)]
"""Of the matrix and of the bias, update by update; the norms are on both sides of the limits."""


def rate(options: dict[str, Any], update: int, num_updates: int) -> float:
    peak, warmup, floor = (options[name] for name in ("learning_rate", "warmup_updates", "final_fraction"))
    if update < warmup:
        return peak * (update + 1) / (warmup + 1)
    left = 1 - (update - warmup) / (num_updates - warmup)
    shape = {"linear": left, "cosine": (1 + math.cos(math.pi * (1 - left))) / 2}[options["schedule"]]
    return peak * (floor + (1 - floor) * shape)


def adamw(options: dict[str, Any]) -> list[float]:
    """The matrix and the bias, from 1.5 each."""
    (first, second), eps = options["betas"], options["eps"]
    numbers, means, squares = [1.5, 1.5], [0.0, 0.0], [0.0, 0.0]
    for update, gradients in enumerate(GRADIENTS):
        lr, norm = rate(options, update, len(GRADIENTS)), math.hypot(*gradients)
        shrink = min(1.0, options["max_gradient_norm"] / norm)
        for i, gradient in enumerate(gradients):
            means[i] = first * means[i] + (1 - first) * shrink * gradient
            squares[i] = second * squares[i] + (1 - second) * (shrink * gradient) ** 2
            mean, square = means[i] / (1 - first ** (update + 1)), squares[i] / (1 - second ** (update + 1))
            numbers[i] *= 1 - lr * options["weight_decay"] * (i == 0)  # a bias does not decay
            numbers[i] -= lr * mean / (math.sqrt(square) + eps)
    return numbers


def linear() -> nn.Linear:
    made = nn.Linear(1, 1).double()
    for parameter in made.parameters():
        nn.init.constant_(parameter, 1.5)
    return made


@pytest.mark.parametrize("options", [FIRST, SECOND])
def test_the_weights_after_some_updates_are_those_of_adamw_with_these_settings(options: dict[str, Any]) -> None:
    module = linear()
    learner = Learner(module, optimizer_options(OptimizerConfig(**options)), num_updates=len(GRADIENTS))
    rates = [
        learner.update([g], lambda g: (g[0] * module.weight.sum() + g[1] * module.bias.sum(), None)).learning_rate
        for g in GRADIENTS
    ]
    assert rates == pytest.approx([rate(options, update, len(GRADIENTS)) for update in range(len(GRADIENTS))])
    assert [module.weight.item(), module.bias.item()] == pytest.approx(adamw(options), rel=1e-9)


def test_a_gradient_that_is_not_finite_stops_the_run_where_it_is_told_to() -> None:
    def update(options: dict[str, Any]) -> str | None:
        module = linear()
        learner = Learner(module, optimizer_options(OptimizerConfig(**options)), num_updates=1)
        return learner.update([None], lambda _: ((module.weight.sum() - 1.5).abs().sqrt(), None)).refusal

    assert update(SECOND) is not None
    with pytest.raises(TrainingError, match="non_finite_gradient: stop"):
        update(FIRST)


def trainer(**options: Any) -> PPOTrainer:
    base = {"num_steps": 5, "prompts_per_step": 6, "epochs_per_step": 3, "critic_warmup_steps": 1}
    policy, value = options.pop("policy", None), options.pop("value", None)
    config = PPOConfig(**(base | options))
    return PPOTrainer(policy or tiny_language_model(), tiny_tokenizer(), value=value, config=config)


def check(learner: Learner, options: dict[str, Any], num_updates: int) -> None:
    assert learner.options == OptimizerOptions(**options)
    assert learner.num_updates == num_updates
    group = learner.optimizer.param_groups[0]
    names = ("lr", "betas", "eps", "weight_decay")
    assert [group[name] for name in names] == [
        options[name] for name in ("learning_rate", "betas", "eps", "weight_decay")
    ]


@pytest.mark.parametrize("value", [None, "trunk"])
def test_policy_and_critic_have_an_optimizer_each_and_schedules_of_their_own_lengths(value: str | None) -> None:
    """Six responses in updates of four, three times a step; the policy learns in four steps, a trunk's head in one."""
    made = trainer(policy_optimizer=FIRST, value_optimizer=SECOND, minibatch_responses=4, value=value)
    check(made.learners["policy"], FIRST, 4 * 3 * 2)
    check(made.learners["value"], SECOND, (1 if value else 5) * 3 * 2)


def test_without_a_size_a_minibatch_is_a_quarter_of_the_batch_and_the_rates_are_those_of_the_page() -> None:
    made = trainer(prompts_per_step=9, responses_per_prompt=2)
    assert made.learners["policy"].num_updates == 4 * 3 * 4
    rates = [made.learners[role].options.learning_rate for role in ("policy", "value")]  # type: ignore[union-attr]
    assert rates == [1e-6, 1e-5]
    adapted = LanguageModel(tiny_language_model()).with_adapter(LoRAOptions(rank=2))
    assert trainer(policy=adapted).learners["policy"].options.learning_rate == 1e-5  # type: ignore[union-attr]


TASKS: dict[str, Callable[..., Any]] = {
    "sft": lambda **options: sft_task(examples_per_step=4, **options),
    "reward": lambda **options: reward_task(pairs_per_step=4, **options),
    "dpo": lambda **options: dpo_task(*two_models(torch.float32), pairs_per_step=4, **options),
    "kto": lambda **options: kto_task(*two_models(torch.float32), labelled(6), examples_per_step=4, **options),
}


@pytest.mark.parametrize("kind", TASKS)
def test_the_others_have_that_of_their_section_and_updates_of_its_size(kind: str) -> None:
    """Six rows two and a half times over, in updates of four."""
    made = TASKS[kind](optimizer=FIRST, num_epochs=2.5)
    (learner,) = made.learners.values()
    check(learner, FIRST, 4)
    assert made.num_steps == 4
