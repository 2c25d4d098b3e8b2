"""Weights and rejection of what another policy sampled, by hand."""

import math

import pytest
import torch
from torch import Tensor

from proximo.algorithms.behaviour import behaviour_ratios, bounded_weights, near_the_sampler

LENGTHS = (3, 2, 0, 1)
MASK = torch.tensor([True, True, False, True, True, True])
CHANGES = (0.5, -0.2, math.nan, -1.0, 0.4, 0.1)
"""Log of policy / sampler at each token."""


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_a_ratio_is_that_of_a_token_or_the_product_over_its_response():
    proximal = numbers(*CHANGES).requires_grad_()
    each = behaviour_ratios(proximal, torch.zeros(6), MASK, LENGTHS, of_responses=False)
    assert each[MASK].tolist() == pytest.approx([math.exp(x) for x in (0.5, -0.2, -1.0, 0.4, 0.1)])
    whole = behaviour_ratios(proximal, torch.zeros(6), MASK, LENGTHS, of_responses=True)
    assert whole[MASK].tolist() == pytest.approx([math.exp(x) for x in (0.3, 0.3, -0.6, -0.6, 0.1)])
    assert not each.requires_grad
    assert not whole.requires_grad


def test_weights_beyond_either_bound_are_cut_to_it_or_dropped():
    ratios = numbers(0.3, 0.5, 1.0, 2.0, 2.5)
    assert bounded_weights(ratios, floor=0.5, cap=2, masked=False).tolist() == [0.5, 0.5, 1, 2, 2]
    assert bounded_weights(ratios, floor=0.5, cap=2, masked=True).tolist() == [0, 0.5, 1, 2, 0]
    assert bounded_weights(ratios, floor=0, cap=2, masked=True).tolist() == [0.3, 0.5, 1, 2, 0]


@pytest.mark.parametrize(
    ("estimator", "over", "limit", "kept"),
    [
        ("k1", "token", 0.45, [1, 4, 5]),  # |log-ratio| of 0.5, 0.2, 1.0, 0.4, 0.1
        ("k2", "token", 0.1, [1, 4, 5]),  # half their squares: 0.125, 0.02, 0.5, 0.08, 0.005
        ("k3", "token", 0.12, [1, 4, 5]),  # 0.149, 0.019, 0.368, 0.092, 0.005
        ("k1", "mean", 0.2, [0, 1, 5]),  # 0.15, -0.3, 0.1
        ("k1", "sum", 0.35, [0, 1, 5]),  # 0.3, -0.6, 0.1
        ("k1", "sum", 0.7, [0, 1, 3, 4, 5]),
        ("k1", "max", 0.6, [0, 1, 5]),
        ("k2", "mean", 0.1, [0, 1, 5]),  # 0.0725, 0.29, 0.005
        ("k3", "sum", 0.2, [0, 1, 5]),  # 0.168, 0.46, 0.005
        ("k3", "max", 0.15, [0, 1, 5]),
    ],
)
def test_what_is_further_than_the_limit_is_left_out_alone_or_with_its_response(estimator, over, limit, kept):
    found = near_the_sampler(
        numbers(*CHANGES), torch.zeros(6), MASK, LENGTHS, estimator=estimator, over=over, limit=limit
    )
    assert found.nonzero().flatten().tolist() == kept


def test_the_mean_of_k1_bounds_the_geometric_mean_of_the_ratios():
    """Ratios 2 and 0.6 have the geometric mean sqrt(1.2) = exp(0.0912)."""
    changes, mask = numbers(math.log(2), math.log(0.6)), torch.tensor([True, True])
    for limit, kept in ((0.0911, False), (0.0912, True)):
        found = near_the_sampler(changes, torch.zeros(2), mask, (2,), estimator="k1", over="mean", limit=limit)
        assert found.tolist() == [kept, kept]
