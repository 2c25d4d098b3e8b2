"""Scores become rewards, rewards advantages; what does not count, counts nowhere. Numbers worked by hand."""

from typing import Any

import pytest
import torch

from proximo.config.ppo.options import PPOConfig
from proximo.ppo.experience import token_values
from proximo.ppo.step import experience_of
from proximo.ppo.train_state import TrainState
from proximo.records import Experience, Finish, Passes, Scored
from records_made import response, scored

CLOSE = {"rtol": 0, "atol": 1e-6}


def build(
    batch: list[Scored],
    *,
    reference: list[float] | None = None,
    values: list[float] | None = None,
    full_kl: list[float] | None = None,
    kl_coefficient: float = 0.1,
    advantage: dict | None = None,
    **options,
) -> Experience:
    old = torch.cat([s.response.logprobs for s in batch])
    passes = Passes(
        old_logprobs=old,
        reference_logprobs=None if reference is None else torch.tensor(reference),
        values=None if values is None else torch.tensor(values),
        full_kl=None if full_kl is None else torch.tensor(full_kl),
    )
    config = PPOConfig(**({"advantage": {"standardise": False} | (advantage or {}), "kl": "none"} | options))
    return experience_of(batch, passes, TrainState(kl_coefficient=kl_coefficient), config=config)[0]


@pytest.mark.parametrize(
    ("measure", "penalty"), [("k1", -0.5), ("k2", 0.125), ("abs", 0.5), ("k3", 0.148721), ("full", 0.7)]
)
def test_each_measure_of_the_kl_enters_the_reward(measure: str, penalty: float) -> None:
    """Of a token that the reference likes better, where no two of them are equal."""
    batch = [scored(0.0, of=response([2], logprobs=[-1.0]))]
    kl = {"kind": "reward", "estimator": measure}
    made = build(batch, reference=[-0.5], values=[0.0, 0.0], full_kl=[0.7], kl=kl, kl_coefficient=1.0)
    torch.testing.assert_close(made.rewards, torch.tensor([-penalty]), **CLOSE)


def test_without_a_lambda_of_its_own_the_return_is_the_advantage_plus_the_value() -> None:
    made = build([scored(1.0)], values=[0.2, 0.3, 0.4, 9.0], advantage={"length_adaptive": 2 / 3})
    torch.testing.assert_close(token_values(made), torch.tensor([0.2, 0.3, 0.4]))
    torch.testing.assert_close(made.returns, made.advantages + torch.tensor([0.2, 0.3, 0.4]), **CLOSE)


def test_a_clamped_kl_costs_no_more_than_its_limit_on_a_token() -> None:
    batch = [scored(2.0, of=response(logprobs=[-1.0, -2.0, -3.0]))]
    reference = [-9.0, -2.25, -2.0]
    made = build(batch, reference=reference, values=[0.0] * 4, kl={"kind": "reward", "clamp": 0.5}, kl_coefficient=2.0)
    torch.testing.assert_close(made.rewards, torch.tensor([-1.0, -0.5, 3.0]), **CLOSE)


def test_a_cut_response_can_be_left_out_and_then_counts_nowhere() -> None:
    batch = [scored(1.0), scored(50.0, of=response(finish=Finish.LENGTH)), scored(3.0)]
    made = build(batch, values=[0.0] * 12, truncation="mask", advantage={"standardise": True, "gae_lambda": 1.0})
    assert made.mask.tolist() == [True] * 3 + [False] * 3 + [True] * 3
    assert made.advantages[3:6].tolist() == [0.0] * 3
    assert made.advantages[made.mask].mean().abs() < 1e-6
    torch.testing.assert_close(made.advantages[:3], torch.full((3,), -1.0), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("whiten", "advantages"),
    [
        ("none", [0.797594, 0.777279, 0.610216, -1.095016, -1.090073]),
        ("keep_mean", [0.727775, 0.780943, 0.680795, -1.093097, -1.096416]),
    ],
)
def test_with_the_unbiased_variance_the_numbers_are_those_of_trl(whiten: str, advantages: list[float]) -> None:
    batch = [
        scored(1.0, of=response(logprobs=[-1.0, -2.0, -0.5])),
        scored(-0.5, of=response([7, 2], logprobs=[-0.3, -0.7])),
    ]
    options: dict[str, Any] = {
        "reference": [-1.2, -1.5, -0.9, -0.1, -1.7],
        "values": [0.1, 0.2, 0.3, 9.0, 0.5, 0.4, 9.0],
        "score": {"whiten_rewards": whiten},
        "kl": "reward",
        "kl_coefficient": 0.2,
    }
    made, plain = (build(batch, **options, advantage={"standardise": True, "unbiased_variance": x}) for x in (1, 0))
    torch.testing.assert_close(made.advantages, torch.tensor(advantages), rtol=0, atol=1e-5)
    assert (plain.advantages - made.advantages).abs().max() > 0.05
