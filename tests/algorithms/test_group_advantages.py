"""Baselines from the group of responses to one prompt."""

from statistics import mean, pstdev, stdev

import pytest
import torch

from proximo.algorithms.group_baselines import group_centred, group_standardised, leave_one_out
from proximo.algorithms.masking import broadcast_to_tokens

SCORES = torch.tensor([1.0, 10.0, 4.0, 7.0, 20.0, 30.0], dtype=torch.float64)
GROUPS = torch.tensor([9, 2, 9, 9, 2, -1])
MEMBERS = {9: [0, 2, 3], 2: [1, 4], -1: [5]}
ALL_VALID = torch.ones(6, dtype=torch.bool)
FUNCTIONS = [group_centred, group_standardised, leave_one_out]


@pytest.mark.parametrize("invalid", range(6))
def test_leave_one_out_is_the_score_minus_the_mean_of_the_others_that_count(invalid):
    valid = torch.arange(6) != invalid
    found = leave_one_out(SCORES, GROUPS, valid).tolist()
    for members in MEMBERS.values():
        for i in members:
            others = [SCORES[j].item() for j in members if j not in (i, invalid)]
            counts = others and i != invalid
            assert found[i] == pytest.approx(SCORES[i].item() - mean(others) if counts else 0)


@pytest.mark.parametrize(("correction", "deviation"), [(0, pstdev), (1, stdev)])
def test_standardised_against_the_standard_library(correction, deviation):
    found = group_standardised(SCORES, GROUPS, ALL_VALID, correction=correction, epsilon=0.01)
    for group in (9, 2):
        scores = SCORES[MEMBERS[group]].tolist()
        wanted = [(s - mean(scores)) / (deviation(scores) + 0.01) for s in scores]
        assert found[MEMBERS[group]].tolist() == pytest.approx(wanted)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("score", [0.1, 1 / 3, 1e6 + 0.1, -7.7])
def test_equal_scores_get_exactly_zero(function, score):
    scores = torch.full((7,), score)
    assert function(scores, torch.zeros(7, dtype=torch.long), torch.ones(7, dtype=torch.bool)).tolist() == [0.0] * 7
    assert function(SCORES, GROUPS, ALL_VALID)[5] == 0, "a group of one"


@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_invalid_response_is_left_out_of_its_groups_baseline(function):
    valid = ALL_VALID.clone()
    valid[2] = False
    poisoned = SCORES.clone()
    poisoned[2] = float("nan")
    found = function(poisoned, GROUPS, valid)
    without = [0, 1, 3, 4, 5]
    assert found[without].equal(function(SCORES[without], GROUPS[without], ALL_VALID[without]))
    assert found[2] == 0


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("infinity", [float("inf"), float("-inf"), float("nan")])
def test_a_group_with_no_valid_response_gets_zeros(function, infinity):
    scores = torch.full((3,), infinity)
    assert function(scores, torch.zeros(3, dtype=torch.long), torch.zeros(3, dtype=torch.bool)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_order_of_responses_does_not_matter(function):
    order = torch.tensor([5, 3, 0, 4, 1, 2])
    shuffled = function(SCORES[order], GROUPS[order], ALL_VALID)
    torch.testing.assert_close(shuffled, function(SCORES, GROUPS, ALL_VALID)[order], rtol=0, atol=1e-12)


def test_tokens_get_the_number_of_their_response():
    assert broadcast_to_tokens(torch.tensor([5.0, 6.0, 7.0]), (2, 0, 1)).tolist() == [5, 5, 7]
