"""A step whose returns are all the same teaches the policy nothing, whatever its critic says of them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from builders import tiny_language_model, tiny_tokenizer
from proximo.algorithms.shaping import NOTHING_SEEN, RunningMoments
from proximo.config.ppo.options import PPOConfig
from proximo.ppo.experience import make_experience
from proximo.ppo.trainer import PPOTrainer
from proximo.records import Experience, Passes
from records_made import response, scored

NOISE = (0.003, -0.002, 0.001, 0.0, -0.001, 0.002)
SEEN = RunningMoments(count=200, mean=0.5, squares=199 * 0.4**2)
"""Of a run whose returns had a standard deviation of 0.4."""


def step(
    *scores: float,
    seen: RunningMoments = SEEN,
    kl: tuple[float, ...] = (),
    lengths: tuple[int, ...] = (),
    **advantage: Any,
) -> tuple[Experience, RunningMoments]:
    """Responses of three tokens each, or of `lengths`; the critic errs by a few thousandths; `kl` nats a token."""
    sizes = lengths or (3,) * len(scores)
    batch = [scored(score, of=response([7] * size)) for score, size in zip(scores, sizes, strict=True)]
    old = torch.cat([each.response.logprobs for each in batch])
    values = torch.cat([1.0 + torch.tensor(NOISE).roll(i)[: size + 1] for i, size in enumerate(sizes)])
    reference = torch.cat(
        [torch.full((size,), -1.0 - nats) for size, nats in zip(sizes, kl or (0.0,) * 9, strict=False)]
    )
    config = PPOConfig(advantage=advantage, kl={"kind": "reward" if kl else "none"})
    passes = Passes(old_logprobs=old, values=values, reference_logprobs=reference)
    made, raw, _ = make_experience(batch, passes, config=config, kl_coefficient=0.05, returns_seen=seen)
    return made, raw.spread.seen


def size(advantages: Tensor) -> float:
    return advantages.square().mean().sqrt().item()


def test_where_all_returns_are_one_number_no_advantage_is_made_of_the_critics_noise() -> None:
    flat, seen = step(1.0, 1.0, 1.0)
    assert flat.is_flat
    assert not flat.advantages.any()
    assert seen.count == 203
    blown_up, _ = step(1.0, 1.0, 1.0, least_spread=None)
    assert size(blown_up.advantages) > 0.99
    assert not blown_up.is_flat


@pytest.mark.parametrize(("scores", "is_flat"), [((1.0, 1.0, 0.995), True), ((1.0, 1.0, 0.97), False)])
def test_nearly_the_same_is_measured_by_the_returns_of_the_run(scores: tuple[float, ...], is_flat: bool) -> None:
    """Deviations of 0.0024 and 0.014 beside 0.4, and a share of 0.01."""
    assert step(*scores)[0].is_flat is is_flat
    small = RunningMoments(count=200, mean=0.5, squares=199 * 0.004**2)
    assert not step(*scores, seen=small)[0].is_flat


def test_the_first_step_has_its_own_returns_to_compare_with() -> None:
    assert step(0.0, 0.0, 0.0, seen=NOTHING_SEEN)[0].is_flat
    assert not step(0.0, 0.0, 0.01, seen=NOTHING_SEEN)[0].is_flat


def test_one_response_alone_has_no_spread_to_be_judged_by() -> None:
    assert not step(1.0)[0].is_flat
    assert step(1.0)[0].advantages.isfinite().all()


def test_a_kl_in_the_reward_is_part_of_what_is_returned() -> None:
    """At 0.05, of 1 and 3 nats a token: a lesson; of 1 and 1.02: nothing beside the returns of the run."""
    pulled, _ = step(1.0, 1.0, kl=(1.0, 3.0))
    assert not pulled.is_flat
    assert pulled.advantages[0] > 0 > pulled.advantages[3]
    assert step(1.0, 1.0, kl=(1.0, 1.02))[0].is_flat


def test_a_discount_makes_equal_scores_of_different_lengths_a_lesson() -> None:
    assert step(1.0, 1.0, lengths=(2, 5))[0].is_flat
    assert not step(1.0, 1.0, lengths=(2, 5), gamma=0.9)[0].is_flat


def test_estimators_without_a_critic_make_nothing_of_equal_scores_by_themselves() -> None:
    made, _ = step(1.0, 1.0, 1.0, kind="return_to_go")
    assert not made.is_flat
    assert not made.advantages.any()


def solved(**options: Any) -> PPOTrainer:
    """Every response scores 1, and the critic has yet to learn it."""
    config = PPOConfig(
        num_steps=8,
        prompts_per_step=8,
        rollout={"max_new_tokens": 4},
        policy_optimizer={"learning_rate": 1e-2, "weight_decay": 0.1},
        value_optimizer={"learning_rate": 1e-2},
        policy_loss={"entropy_coefficient": 0.01},
        **options,
    )
    return PPOTrainer(tiny_language_model(), tiny_tokenizer(chat=False), config=config)


def moved(made: PPOTrainer, role: str) -> bool:
    """Whether training on a solved task moves a weight of the role."""
    before = {name: each.detach().clone() for name, each in made.learners[role].parameters.items()}
    lines = made.train(["a", "b"], reward=lambda prompts, responses, metadata: [1.0] * len(responses))
    flat = [line["advantage/flat"] for line in lines]
    assert all(line["policy/approx_kl"] == 0 for line in lines if line["advantage/flat"])
    assert set(flat) == {float(made.config.advantage.least_spread is not None)}
    return any(not torch.equal(before[name], each) for name, each in made.learners[role].parameters.items())


@pytest.mark.parametrize("kl", ["none", "loss"])
def test_a_solved_policy_keeps_every_bit_while_its_critic_learns(kl: str) -> None:
    assert not moved(solved(kl=kl), "policy")
    assert moved(solved(kl=kl), "value")
    assert moved(solved(kl=kl, advantage={"least_spread": None}), "policy")


def test_on_a_shared_trunk_what_is_left_of_a_flat_step_is_the_loss_of_the_values() -> None:
    model, tokenizer = tiny_language_model(), tiny_tokenizer(chat=False)
    config = PPOConfig(num_steps=2, prompts_per_step=8, rollout={"max_new_tokens": 4}, kl="none")
    config = config.model_copy(update={"policy_optimizer": config.value_optimizer})
    made = PPOTrainer(model, tokenizer, value="trunk", config=config)
    lines = made.train(["a", "b"], reward=lambda prompts, responses, metadata: [1.0] * len(responses))
    assert [line["advantage/flat"] for line in lines] == [1.0, 1.0]
    assert [line["policy/loss"] for line in lines] == [0.0, 0.0]
    assert lines[1]["value/loss"] < lines[0]["value/loss"]
