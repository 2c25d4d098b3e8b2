"""Scores become rewards, rewards advantages; what does not count, counts nowhere. Numbers worked by hand."""

import math
from dataclasses import replace

import pytest
import torch

from proximo.config.ppo.advantage import Advantage
from proximo.config.ppo.options import PPOConfig
from proximo.config.schema.fields import kinds_of, sections_of
from proximo.ppo.experience import make_experience, token_values
from proximo.records import Experience, Finish, Passes, Scored, ScoreState
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
    return make_experience(batch, passes, config=config, kl_coefficient=kl_coefficient)[0]


def test_the_score_sits_once_on_the_last_token_and_the_kl_on_every_token() -> None:
    batch = [scored(2.0, of=response(logprobs=[-1.0, -2.0, -3.0]))]
    made = build(batch, reference=[-1.5, -2.0, -2.0], values=[0.0] * 4, kl={"kind": "reward"})
    torch.testing.assert_close(made.rewards, torch.tensor([-0.05, 0.0, 2.1]), **CLOSE)


@pytest.mark.parametrize(
    ("measure", "penalty"), [("k1", -0.5), ("k2", 0.125), ("abs", 0.5), ("k3", 0.148721), ("full", 0.7)]
)
def test_each_measure_of_the_kl_enters_the_reward(measure: str, penalty: float) -> None:
    """Of a token that the reference likes better, where no two of them are equal."""
    batch = [scored(0.0, of=response([2], logprobs=[-1.0]))]
    kl = {"kind": "reward", "estimator": measure}
    made = build(batch, reference=[-0.5], values=[0.0, 0.0], full_kl=[0.7], kl=kl, kl_coefficient=1.0)
    torch.testing.assert_close(made.rewards, torch.tensor([-penalty]), **CLOSE)


def test_gae_with_gamma_and_lambda_one_gives_the_score_minus_the_value() -> None:
    made = build([scored(1.0)], values=[0.2, 0.3, 0.4, 9.0], advantage={"gae_lambda": 1.0})
    torch.testing.assert_close(made.advantages, torch.tensor([0.8, 0.7, 0.6]), **CLOSE)
    torch.testing.assert_close(made.returns, torch.tensor([1.0, 1.0, 1.0]), **CLOSE)
    torch.testing.assert_close(token_values(made), torch.tensor([0.2, 0.3, 0.4]))


def test_the_value_after_the_last_token_counts_only_where_a_cut_response_bootstraps() -> None:
    cut = scored(1.0, of=response(finish=Finish.LENGTH))
    zero = build([cut], values=[0.0, 0.0, 0.0, 0.5], advantage={"gae_lambda": 1.0})
    bootstrap = build(
        [cut],
        values=[0.0, 0.0, 0.0, 0.5],
        advantage={"gae_lambda": 1.0},
        truncation="bootstrap",
    )
    ended = build(
        [scored(1.0)],
        values=[0.0, 0.0, 0.0, 0.5],
        advantage={"gae_lambda": 1.0},
        truncation="bootstrap",
    )
    assert zero.advantages.tolist() == [1.0, 1.0, 1.0]
    assert bootstrap.advantages.tolist() == [0.5, 0.5, 0.5]
    assert ended.advantages.tolist() == [1.0, 1.0, 1.0]


def test_a_cut_response_can_be_left_out_and_then_counts_nowhere() -> None:
    batch = [scored(1.0), scored(50.0, of=response(finish=Finish.LENGTH)), scored(3.0)]
    made = build(batch, values=[0.0] * 12, truncation="mask", advantage={"standardise": True, "gae_lambda": 1.0})
    assert made.mask.tolist() == [True] * 3 + [False] * 3 + [True] * 3
    assert made.advantages[3:6].tolist() == [0.0] * 3
    assert made.advantages[made.mask].mean().abs() < 1e-6
    torch.testing.assert_close(made.advantages[:3], torch.full((3,), -1.0), rtol=0, atol=1e-4)


def test_without_a_lambda_of_its_own_the_return_is_the_advantage_plus_the_value() -> None:
    made = build([scored(1.0)], values=[0.2, 0.3, 0.4, 9.0], advantage={"length_adaptive": 2 / 3})
    torch.testing.assert_close(made.returns, made.advantages + torch.tensor([0.2, 0.3, 0.4]), **CLOSE)


def test_a_clamped_kl_costs_no_more_than_its_limit_on_a_token() -> None:
    batch = [scored(2.0, of=response(logprobs=[-1.0, -2.0, -3.0]))]
    reference = [-9.0, -2.25, -2.0]
    made = build(batch, reference=reference, values=[0.0] * 4, kl={"kind": "reward", "clamp": 0.5}, kl_coefficient=2.0)
    torch.testing.assert_close(made.rewards, torch.tensor([-1.0, -0.5, 3.0]), **CLOSE)


@pytest.mark.parametrize("advantage", [kind for section in sections_of(Advantage) for kind in kinds_of(section)])
def test_a_fault_of_the_infrastructure_changes_nothing_for_the_others(advantage: str) -> None:
    good = [replace(scored(score), answer_score=0.5) for score in (1.0, 3.0)]
    faulty = scored(math.nan, state=ScoreState.INFRASTRUCTURE_FAULT)
    standardise = advantage != "pass_at_k"
    options = {
        "advantage": {"kind": advantage, "standardise": standardise},
        "responses_per_prompt": 2,
    }
    values = [0.1] * 8 if advantage == "gae" else None
    alone = build(good, values=values, **options)
    with_fault = build([*good, faulty], values=None if values is None else [*values, *[math.nan] * 4], **options)
    torch.testing.assert_close(with_fault.advantages[:6], alone.advantages)
    assert with_fault.advantages[6:].tolist() == [0.0] * 3
    assert not with_fault.mask[6:].any()


def test_an_empty_response_has_no_token_to_learn_from() -> None:
    made = build([scored(1.0, of=response([])), scored(2.0)], values=[0.0] * 5)
    assert made.lengths == (0, 3)
    assert made.rewards.tolist() == [0.0, 0.0, 2.0]


def test_scores_are_clipped_and_cut_responses_can_go_without_one() -> None:
    batch = [scored(9.0), scored(-9.0), scored(9.0, of=response(finish=Finish.LENGTH))]
    made = build(batch, values=[0.0] * 12, score={"clip": 2.0}, truncation="unscored")
    assert made.rewards[[2, 5, 8]].tolist() == [2.0, -2.0, 0.0]
