"""A step whose returns are all the same teaches the policy nothing, whatever its critic says of them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from builders import tiny_language_model, tiny_tokenizer
from ppo_trainers import LARGE, ppo_trainer
from proximo.algorithms.advantages import NOTHING_SEEN, RunningMoments
from proximo.config.ppo.options import PPOConfig
from proximo.ppo.step import experience_of
from proximo.ppo.train_state import TrainState
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
    made, raw, _ = experience_of(batch, passes, TrainState(kl_coefficient=0.05, return_moments=seen), config=config)
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


SMALL = RunningMoments(count=200, mean=0.5, squares=199 * 0.004**2)


@pytest.mark.parametrize(
    ("scores", "options", "is_flat"),
    [
        # deviations of 0.0024 and 0.014 beside 0.4, or beside 0.004, and a share of 0.01
        ((1.0, 1.0, 0.995), {}, True),
        ((1.0, 1.0, 0.97), {}, False),
        ((1.0, 1.0, 0.995), {"seen": SMALL}, False),
        # the first step has its own returns to compare with
        ((0.0, 0.0, 0.0), {"seen": NOTHING_SEEN}, True),
        ((0.0, 0.0, 0.01), {"seen": NOTHING_SEEN}, False),
        # one response has no spread to be judged by
        ((1.0,), {}, False),
        # a KL in the reward is part of what is returned
        ((1.0, 1.0), {"kl": (1.0, 3.0)}, False),
        ((1.0, 1.0), {"kl": (1.0, 1.02)}, True),
        # a discount makes equal scores of different lengths a lesson
        ((1.0, 1.0), {"lengths": (2, 5)}, True),
        ((1.0, 1.0), {"lengths": (2, 5), "gamma": 0.9}, False),
        # without a critic nothing is made of equal scores anyway
        ((1.0, 1.0, 1.0), {"kind": "return_to_go"}, False),
    ],
    ids=str,
)
def test_a_step_is_flat_where_its_returns_hardly_differ_beside_those_of_the_run(
    scores: tuple[float, ...], options: dict[str, Any], is_flat: bool
) -> None:
    made, _ = step(*scores, **options)
    assert made.is_flat is is_flat
    assert made.advantages.isfinite().all()
    assert made.advantages.any() != (is_flat or "kind" in options)
    if "kl" in options and not is_flat:
        assert made.advantages[0] > 0 > made.advantages[3]


def solved(**options: Any) -> PPOTrainer:
    """Every response scores 1, and the critic has yet to learn it."""
    optimizer = LARGE | {"weight_decay": 0.1}
    base = {"num_steps": 3, "prompts_per_step": 8, "rollout": {"max_new_tokens": 4}, "value_optimizer": LARGE}
    loss = {"policy_loss": {"entropy_coefficient": 0.01}, "policy_optimizer": optimizer}
    return ppo_trainer(**(base | loss | options))


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
