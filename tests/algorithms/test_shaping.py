"""What is done to scores, one by one, and where they go as rewards. Numbers worked by hand."""

import json
import statistics
from dataclasses import asdict

import pytest
import torch
from torch import Tensor

from proximo.algorithms.advantages import (
    NOTHING_SEEN,
    RunningMoments,
    clip_scores,
    overlong_penalty,
    shape_rewards,
    update_moments,
)

LENGTHS = (3, 1, 2)
KL = torch.tensor([0.5, -1.0, 2.0, 0.25, 1.0, 1.0], dtype=torch.float64)
SCORES = torch.tensor([10.0, -20.0, 30.0], dtype=torch.float64)
EVERYTHING = torch.ones(6, dtype=torch.bool)
NAN = float("nan")


def test_the_score_goes_once_on_the_last_token_and_kl_is_subtracted_everywhere():
    rewards = shape_rewards(KL, SCORES, EVERYTHING, LENGTHS, kl_coefficient=0.1)
    assert rewards.tolist() == pytest.approx([-0.05, 0.1, 9.8, -20.025, -0.1, 29.9])


@pytest.mark.parametrize(
    ("mask", "scores", "lengths", "rewards"),
    [
        ((1, 1, 0, 1, 0, 1), (10, -20, 30), LENGTHS, [0, 10, 0, -20, 0, 30]),  # a tool's tokens at the end
        ((0, 0, 0, 1, 1, 1), (10, -20, 30), LENGTHS, [0, 0, 0, -20, 0, 30]),  # no token of the policy
        ((1, 1, 1, 1, 1, 1), (10, NAN, -20, 30), (3, 0, 1, 2), [0, 0, 10, -20, 0, 30]),  # no token at all
    ],
)
def test_the_score_goes_on_the_last_token_that_the_policy_wrote(mask, scores, lengths, rewards):
    found = shape_rewards(KL, numbers(*scores), torch.tensor(mask) > 0, lengths, kl_coefficient=0.0)
    assert found.tolist() == rewards


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
    assert after(seen, seen[:1]).deviation is None


def test_moments_are_float64_survive_json_and_take_no_score_that_is_no_number():
    exact = update_moments(NOTHING_SEEN, torch.tensor([16777216.0, 1.0, 1.0], dtype=torch.float32))
    assert exact.mean == 16777218 / 3
    moments = after([0.1, 0.7, 1 / 3], [2 / 3])
    assert RunningMoments(**json.loads(json.dumps(asdict(moments)))) == moments
    assert after([1.0, NAN, 3.0, float("inf")]) == after([1.0, 3.0])
    assert after([NAN]) == NOTHING_SEEN


def test_the_overlong_penalty_is_a_line_over_the_buffer():
    """The lengths of the paper: 20480 tokens at most, the last 4096 of them the buffer."""
    lengths = torch.tensor([1, 16384, 17408, 18432, 20479, 20480, 30000])
    found = overlong_penalty(lengths, max_tokens=20480, buffer_tokens=4096, penalty=2.0)
    assert found.tolist() == [0, 0, 0.5, 1.0, 2 * 4095 / 4096, 2, 2]
