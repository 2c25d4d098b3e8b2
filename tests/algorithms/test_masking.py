"""Masked reductions: hand-worked numbers, and the cases with no or one valid token."""

import pytest
import torch
from torch import Tensor

from proximo.algorithms.masking import masked_mean, masked_variance, rescale, select, standardise, sum_per_token

X = torch.tensor([1.0, 2.0, 6.0, 50.0], dtype=torch.float64)
MASK = torch.tensor([True, True, True, False])
NORMALISERS = [standardise, rescale]


def mask_of(num_valid: int) -> Tensor:
    return torch.arange(len(X)) < num_valid


def test_mean_and_variance_by_hand():
    assert masked_mean(X, MASK).item() == pytest.approx(3)
    assert masked_variance(X, MASK).item() == pytest.approx((4 + 1 + 9) / 3)
    assert masked_variance(X, MASK, correction=1).item() == pytest.approx((4 + 1 + 9) / 2)


@pytest.mark.parametrize("correction", [0, 1])
def test_standardised_has_mean_zero_and_variance_one_on_the_mask_and_zero_outside(correction):
    found = standardise(X, MASK, correction=correction, epsilon=0)
    assert masked_mean(found, MASK).item() == pytest.approx(0, abs=1e-14)
    assert masked_variance(found, MASK, correction=correction).item() == pytest.approx(1)
    assert found[3] == 0


@pytest.mark.parametrize("correction", [0, 1])
def test_rescaled_has_variance_one_and_keeps_the_mean(correction):
    found = rescale(X, MASK, correction=correction, epsilon=0)
    assert masked_mean(found, MASK).item() == pytest.approx(3)
    assert masked_variance(found, MASK, correction=correction).item() == pytest.approx(1)
    assert found[3] == 0


def test_epsilon_stands_under_the_root():
    assert standardise(X, MASK, epsilon=2.0)[2].item() == pytest.approx(3 / (14 / 3 + 2) ** 0.5)


def test_sum_per_token_divides_by_what_it_is_told():
    assert sum_per_token(X, MASK, denominator=18).item() == pytest.approx(0.5)
    assert sum_per_token(X, MASK, denominator=torch.tensor(4)).item() == pytest.approx(2.25)


def test_select_puts_zeros_outside_the_mask_and_leaves_its_arguments_alone():
    x, y = X.clone(), -X
    first, second = select(MASK, x, y)
    assert first.tolist() == [1, 2, 6, 0]
    assert second.tolist() == [-1, -2, -6, 0]
    assert x.equal(X)


@pytest.mark.parametrize("correction", [0, 1])
def test_no_valid_token_gives_zeros(correction):
    nothing = mask_of(0)
    assert masked_mean(X, nothing) == 0
    assert masked_variance(X, nothing, correction=correction) == 0
    assert sum_per_token(X, nothing, denominator=1) == 0
    for normalise in NORMALISERS:
        assert normalise(X, nothing, correction=correction).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("correction", [0, 1])
def test_one_valid_token_has_no_variance(correction):
    one = mask_of(1)
    assert masked_mean(X, one) == 1
    assert masked_variance(X, one, correction=correction) == 0
    assert standardise(X, one, correction=correction).tolist() == [0, 0, 0, 0]
    assert rescale(X, one, correction=correction).tolist() == [1, 0, 0, 0]


def test_no_token_at_all_is_no_error():
    empty, nothing = torch.zeros(0), torch.zeros(0, dtype=torch.bool)
    assert masked_mean(empty, nothing) == 0
    assert standardise(empty, nothing).shape == (0,)


def test_large_equal_entries_do_not_become_noise():
    x = torch.full((1001,), 1234.567)
    assert standardise(x, torch.ones(1001, dtype=torch.bool)).abs().max() < 1e-6


@pytest.mark.parametrize("function", [masked_mean, masked_variance, *NORMALISERS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_is_kept(function, dtype):
    assert function(X.to(dtype), MASK).dtype is dtype


def test_standardising_does_not_depend_on_how_the_tokens_are_shaped():
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = x > -0.5
    flat = standardise(x.flatten(), mask.flatten())
    torch.testing.assert_close(standardise(x, mask).flatten(), flat, rtol=0, atol=1e-12)
