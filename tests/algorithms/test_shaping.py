"""What is done to scores, one by one, and where they go as rewards. Numbers worked by hand."""

import json
import statistics
from dataclasses import asdict

import pytest
import torch
from torch import Tensor

from proximo.algorithms.masking import segment_sum
from proximo.algorithms.shaping import (
    NOTHING_SEEN,
    RunningMoments,
    apply_penalties,
    clip_scores,
    common_score,
    fixed_penalties,
    overlong_penalty,
    scale_by_moments,
    shape_rewards,
    shift_and_scale,
    update_moments,
)

LENGTHS = (3, 1, 2)
KL = torch.tensor([0.5, -1.0, 2.0, 0.25, 1.0, 1.0], dtype=torch.float64)
SCORES = torch.tensor([10.0, -20.0, 30.0], dtype=torch.float64)
EVERYTHING = torch.ones(6, dtype=torch.bool)
NAN = float("nan")
SIZES = torch.tensor([3, 2, 3, 1])
TERMINATED = torch.tensor([True, True, False, True])
"""As in the table of stop tokens of torchtune: the first ends with its very last token, the third does not end."""


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


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def after(*batches: list[float]) -> RunningMoments:
    moments = NOTHING_SEEN
    for batch in batches:
        moments = update_moments(moments, numbers(*batch))
    return moments


def test_moments_are_those_of_the_golden_vectors():
    """TRL's: [1, 2, 3, 4], then [10, 12, 14, 16]."""
    first, both = after([1, 2, 3, 4]), after([1, 2, 3, 4], [10, 12, 14, 16])
    assert (first.mean, first.deviation) == pytest.approx((2.5, 1.290994), abs=1e-6)
    assert (both.mean, both.deviation) == pytest.approx((7.75, 5.922114), abs=1e-6)
    assert both.count == 8
    assert (first.squares / 4, both.squares / 8) == pytest.approx((1.25, 30.6875), abs=1e-9)


@pytest.mark.parametrize("offset", [0.0, 1e6, -1e6])
def test_moments_of_parts_are_those_of_the_whole_far_from_zero_too(offset):
    parts = [[0.5], [2.0, -1.0], [], [7.0, 0.25, 3.0]]
    shifted = [[x + offset for x in part] for part in parts]
    whole = [x for part in shifted for x in part]
    found = after(*shifted)
    assert found.count == 6
    assert found.mean == pytest.approx(statistics.mean(whole), rel=1e-12)
    assert found.deviation == pytest.approx(statistics.stdev(whole), rel=1e-8)


@pytest.mark.parametrize("seen", [[], [3.0], [0.1] * 7, [1 / 3] * 100, [-5.0, -5.0], [0.0, 0.0]])
def test_scores_without_a_spread_are_not_divided(seen):
    moments = after(seen, seen[:1])
    assert moments.deviation is None
    scores = numbers(2.0, -1.0)
    assert scale_by_moments(scores, moments, subtract_mean=False).equal(scores)
    torch.testing.assert_close(scale_by_moments(scores, moments, subtract_mean=True), scores - moments.mean)


def test_a_score_that_is_no_number_does_not_spoil_the_moments():
    assert after([1.0, NAN, 3.0, float("inf")]) == after([1.0, 3.0])
    assert after([NAN]) == NOTHING_SEEN


def test_moments_survive_json_to_the_bit():
    moments = after([0.1, 0.7, 1 / 3], [2 / 3])
    assert RunningMoments(**json.loads(json.dumps(asdict(moments)))) == moments


def test_moments_are_float64_whatever_the_scores_are():
    exact = update_moments(NOTHING_SEEN, torch.tensor([16777216.0, 1.0, 1.0], dtype=torch.float32))
    assert exact.mean == 16777218 / 3


def test_scaling_keeps_the_mean_and_standardising_takes_it_away():
    moments = after([1.0, 3.0, 5.0])
    assert scale_by_moments(numbers(5.0, -2.0), moments, subtract_mean=False).tolist() == [2.5, -1.0]
    assert scale_by_moments(numbers(5.0, -2.0), moments, subtract_mean=True).tolist() == [1.0, -2.5]


def test_the_bias_is_added_before_the_scale_multiplies():
    assert shift_and_scale(numbers(1.0, -2.0), bias=0.5, scale=2.0).tolist() == [3.0, -3.0]


def test_only_a_response_that_did_not_end_is_penalised_for_it():
    """The end may be the last possible token: where it stands is not asked."""
    found = fixed_penalties(SIZES, TERMINATED, missing_eos=3.0, min_tokens=0, too_short=0.0)
    assert found.tolist() == [0, 0, 3, 0]


def test_a_response_of_exactly_the_shortest_length_is_not_too_short():
    found = fixed_penalties(SIZES, TERMINATED, missing_eos=0.0, min_tokens=2, too_short=0.1)
    assert found.tolist() == [0, 0, 0, 0.1]


def test_both_penalties_add_up():
    found = fixed_penalties(SIZES, TERMINATED, missing_eos=3.0, min_tokens=4, too_short=0.5)
    assert found.tolist() == [0.5, 0.5, 3.5, 0.5]


def test_penalties_are_subtracted_or_stand_in_for_the_score():
    scores, penalties = numbers(2.0, -9.0, 5.0), numbers(0.0, 1.0, 1.0)
    assert apply_penalties(scores, penalties, replace=False).tolist() == [2, -10, 4]
    assert apply_penalties(scores, penalties, replace=True).tolist() == [2, -1, -1]


def test_the_overlong_penalty_is_a_line_over_the_buffer():
    """The lengths of the paper: 20480 tokens at most, the last 4096 of them the buffer."""
    lengths = torch.tensor([1, 16384, 17408, 18432, 20479, 20480, 30000])
    found = overlong_penalty(lengths, max_tokens=20480, buffer_tokens=4096, penalty=2.0)
    assert found.tolist() == [0, 0, 0.5, 1.0, 2 * 4095 / 4096, 2, 2]


def test_scores_have_one_in_common_or_none():
    assert common_score([0.5, 0.5]) == 0.5
    assert common_score([0.5, 0.25]) is None
    assert common_score([NAN, NAN]) is None
    assert common_score([]) is None
