"""The flat layout against plain slices; masked reductions by hand, and the cases with no or one valid token."""

import pytest
import torch
from torch import Tensor

from proximo.algorithms.masking import (
    final_value_positions,
    last_indices,
    masked_mean,
    masked_variance,
    rescale,
    segment_ids,
    segment_rows,
    segment_sum,
    select,
    standardise,
    sum_per_token,
    token_positions,
    value_positions,
)

X = torch.tensor([1.0, 2.0, 6.0, 50.0], dtype=torch.float64)
MASK = torch.tensor([True, True, True, False])
NORMALISERS = [standardise, rescale]
LENGTHS = (2, 0, 3, 1)
TOKENS = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], dtype=torch.float64)


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


def test_every_token_knows_its_response_and_its_place_in_it():
    assert segment_ids(LENGTHS).tolist() == [0, 0, 2, 2, 2, 3]
    assert token_positions(LENGTHS).tolist() == [0, 1, 0, 1, 2, 0]


def test_values_have_one_entry_more_per_response():
    names = ["0:V0", "0:V1", "0:end", "1:end", "2:V0", "2:V1", "2:V2", "2:end", "3:V0", "3:end"]
    assert [names[i] for i in value_positions(LENGTHS)] == ["0:V0", "0:V1", "2:V0", "2:V1", "2:V2", "3:V0"]
    assert [names[i] for i in final_value_positions(LENGTHS)] == ["0:end", "1:end", "2:end", "3:end"]


def test_sums_over_responses_with_zero_for_an_empty_one():
    assert segment_sum(TOKENS, LENGTHS).tolist() == [3, 0, 12, 6]


def test_rows_hold_one_response_each_and_zeros_after_it():
    assert segment_rows(TOKENS, LENGTHS).tolist() == [[1, 2, 0], [0, 0, 0], [3, 4, 5], [6, 0, 0]]


def test_gradient_of_a_sum_reaches_the_tokens_of_that_response_only():
    x = TOKENS.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(segment_sum(x, LENGTHS)[2], x)
    assert gradient.tolist() == [0, 0, 1, 1, 1, 0]


def test_last_token_of_each_response():
    assert last_indices((2, 3, 1)).tolist() == [1, 4, 5]


def test_an_empty_response_has_no_last_token():
    with pytest.raises(ValueError, match="response 1 of 4 is empty"):
        last_indices(LENGTHS)


def test_lengths_that_do_not_add_up_are_an_error():
    with pytest.raises((IndexError, RuntimeError)):
        segment_sum(TOKENS, (2, 3))


def test_no_response_at_all():
    assert segment_ids(()).shape == value_positions(()).shape == final_value_positions(()).shape == (0,)
    assert segment_sum(torch.zeros(0), ()).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.long])
def test_a_sum_keeps_the_dtype(dtype):
    assert segment_sum(TOKENS.to(dtype), LENGTHS).dtype is dtype
