"""First steps in which the critic learns alone: the policy, its schedule and the KL coefficient wait."""

from functools import partial
from itertools import pairwise

import pytest
import torch

from ppo_trainers import LARGE, PROMPTS, count_a_and_letters, ppo_trainer

WARMUP, STEPS = 2, 4
FALLING = LARGE | {"schedule": "linear"}
ADAPTIVE = {"coefficient": 0.1, "adaptive": {"target": 1.0, "horizon": 4}}


trainer = partial(
    ppo_trainer,
    num_steps=STEPS,
    critic_warmup_steps=WARMUP,
    epochs_per_step=1,
    minibatch_responses=4,
    kl=ADAPTIVE,
    policy_optimizer=FALLING,
    value_optimizer=FALLING,
)


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def test_the_policy_waits_and_the_critic_learns() -> None:
    made = trainer()
    models = made.policy.model, made.roles.value.model.model
    seen = [[weights(model) for model in models]]
    made.train(PROMPTS, reward=count_a_and_letters, on_step=lambda *_: seen.append([weights(x) for x in models]))
    for step, (before, after) in enumerate(pairwise(seen)):
        moved = [any(not a.equal(b) for a, b in zip(*pair, strict=True)) for pair in zip(before, after, strict=True)]
        assert moved == [step >= WARMUP, True]


def test_the_schedule_of_the_policy_counts_its_own_updates_and_that_of_the_critic_all() -> None:
    lines = trainer().train(PROMPTS, reward=count_a_and_letters)
    assert [line.get("policy/learning_rate") for line in lines] == [None, None, 1e-2, pytest.approx(0.5e-2)]
    assert [line["value/learning_rate"] for line in lines] == pytest.approx([1e-2, 0.75e-2, 0.5e-2, 0.25e-2])
    assert [line["progress/updates"] for line in lines] == [0, 0, 1, 2]


def test_a_step_of_the_warmup_reports_no_policy_and_counts_one_model_in_its_speed() -> None:
    first, *_, last = trainer().train(PROMPTS, reward=count_a_and_letters)
    assert not [name for name in first if name.startswith(("first_minibatch/", "policy/clip", "policy/loss"))]
    assert "time/train_policy_seconds" not in first
    assert first["throughput/train_tokens_per_second"] > 0
    assert {"policy/loss", "first_minibatch/limit_exceeded", "time/train_policy_seconds"} <= set(last)


def test_a_policy_that_stands_still_does_not_lower_the_kl_coefficient() -> None:
    lines = trainer().train(PROMPTS, reward=count_a_and_letters)
    assert [line["kl/coefficient"] for line in lines[: WARMUP + 1]] == [0.1] * (WARMUP + 1)
    assert lines[-1]["kl/coefficient"] != 0.1
