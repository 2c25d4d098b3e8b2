"""Rewards per token: where the score goes, and what the penalty does."""

import pytest
import torch

from proximo.algorithms.masking import segment_sum
from proximo.algorithms.shaping import clip_scores, shape_rewards

LENGTHS = (3, 1, 2)
KL = torch.tensor([0.5, -1.0, 2.0, 0.25, 1.0, 1.0], dtype=torch.float64)
SCORES = torch.tensor([10.0, -20.0, 30.0], dtype=torch.float64)
EVERYTHING = torch.ones(6, dtype=torch.bool)


def test_the_score_goes_once_on_the_last_token_and_kl_is_subtracted_everywhere():
    rewards = shape_rewards(KL, SCORES, EVERYTHING, LENGTHS, kl_coefficient=0.1)
    assert rewards.tolist() == pytest.approx([-0.05, 0.1, 9.8, -20.025, -0.1, 29.9])


def test_the_rewards_of_a_response_add_up_to_score_minus_weighted_kl():
    rewards = shape_rewards(KL, SCORES, EVERYTHING, LENGTHS, kl_coefficient=0.3)
    torch.testing.assert_close(segment_sum(rewards, LENGTHS), SCORES - 0.3 * segment_sum(KL, LENGTHS))


def test_a_response_that_ends_with_a_tools_tokens_has_its_score_before_them():
    mask = torch.tensor([True, True, False, True, False, True])
    rewards = shape_rewards(KL, SCORES, mask, LENGTHS, kl_coefficient=0.0)
    assert rewards.tolist() == [0, 10, 0, -20, 0, 30]


def test_a_response_without_a_token_of_the_policy_has_no_reward_and_shifts_no_other():
    mask = torch.tensor([False, False, False, True, True, True])
    rewards = shape_rewards(KL, SCORES, mask, LENGTHS, kl_coefficient=0.0)
    assert rewards.tolist() == [0, 0, 0, -20, 0, 30]


def test_an_empty_response_shifts_no_score():
    scores = torch.tensor([10.0, float("nan"), -20.0, 30.0], dtype=torch.float64)
    rewards = shape_rewards(KL, scores, EVERYTHING, (3, 0, 1, 2), kl_coefficient=0.0)
    assert rewards.tolist() == [0, 0, 10, -20, 0, 30]


def test_no_token_at_all_is_no_error():
    nothing = torch.zeros(0, dtype=torch.bool)
    assert shape_rewards(torch.zeros(0), torch.zeros(1), nothing, (0,), kl_coefficient=1.0).shape == (0,)


def test_the_arguments_are_left_alone():
    kl, scores = KL.clone(), SCORES.clone()
    shape_rewards(kl, scores, EVERYTHING, LENGTHS, kl_coefficient=0.1)
    assert kl.equal(KL)
    assert scores.equal(SCORES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rewards_have_the_dtype_of_the_kl(dtype):
    for scores in (SCORES, SCORES.float()):
        assert shape_rewards(KL.to(dtype), scores, EVERYTHING, LENGTHS, kl_coefficient=0.1).dtype is dtype


def test_scores_are_cut_on_both_sides_and_nan_is_not_hidden():
    found = clip_scores(torch.tensor([-7.0, -5.0, 0.5, 9.0, float("nan")]), 5)
    assert found[:4].tolist() == [-5, -5, 0.5, 5]
    assert found[4].isnan()
