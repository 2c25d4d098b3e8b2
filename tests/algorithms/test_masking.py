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
    running_sums,
    segment_ids,
    segment_rows,
    segment_sum,
    select,
    standardise,
    sum_per_token,
    sums_by_products,
    token_positions,
    value_positions,
)

X = torch.tensor([1.0, 2.0, 6.0, 50.0], dtype=torch.float64)
MASK = torch.tensor([True, True, True, False])
LENGTHS = (2, 0, 3, 1)
TOKENS = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], dtype=torch.float64)


def mask_of(num_valid: int) -> Tensor:
    return torch.arange(len(X)) < num_valid


def test_mean_and_variance_by_hand():
    assert masked_mean(X, MASK).item() == pytest.approx(3)
    assert masked_variance(X, MASK).item() == pytest.approx((4 + 1 + 9) / 3)
    assert masked_variance(X, MASK, correction=1).item() == pytest.approx((4 + 1 + 9) / 2)


@pytest.mark.parametrize("correction", [0, 1])
@pytest.mark.parametrize(("normalise", "mean"), [(standardise, 0), (rescale, 3)])
def test_what_is_normalised_has_variance_one_and_a_mean_of_zero_or_its_own(normalise, mean, correction):
    found = normalise(X, MASK, correction=correction, epsilon=0)
    assert masked_mean(found, MASK).item() == pytest.approx(mean, abs=1e-14)
    assert masked_variance(found, MASK, correction=correction).item() == pytest.approx(1)
    assert found[3] == 0
    assert standardise(X, MASK, epsilon=2.0)[2].item() == pytest.approx(3 / (14 / 3 + 2) ** 0.5), "under the root"


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
def test_no_valid_token_gives_zeros_and_one_has_no_variance(correction):
    nothing, one = mask_of(0), mask_of(1)
    assert (masked_mean(X, nothing), masked_mean(X, one), sum_per_token(X, nothing, denominator=1)) == (0, 1, 0)
    for mask in (nothing, one):
        assert masked_variance(X, mask, correction=correction) == 0
        assert standardise(X, mask, correction=correction).tolist() == [0, 0, 0, 0]
        assert rescale(X, mask, correction=correction).tolist() == [float(mask[0]), 0, 0, 0]


def test_large_equal_entries_do_not_become_noise():
    x = torch.full((1001,), 1234.567)
    assert standardise(x, torch.ones(1001, dtype=torch.bool)).abs().max() < 1e-6


def test_standardising_does_not_depend_on_how_the_tokens_are_shaped():
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = x > -0.5
    flat = standardise(x.flatten(), mask.flatten())
    torch.testing.assert_close(standardise(x, mask).flatten(), flat, rtol=0, atol=1e-12)


def test_the_flat_layout_by_hand():
    assert segment_ids(LENGTHS).tolist() == [0, 0, 2, 2, 2, 3]
    assert token_positions(LENGTHS).tolist() == [0, 1, 0, 1, 2, 0]
    names = ["0:V0", "0:V1", "0:end", "1:end", "2:V0", "2:V1", "2:V2", "2:end", "3:V0", "3:end"]
    assert [names[i] for i in value_positions(LENGTHS)] == ["0:V0", "0:V1", "2:V0", "2:V1", "2:V2", "3:V0"]
    assert [names[i] for i in final_value_positions(LENGTHS)] == ["0:end", "1:end", "2:end", "3:end"]
    assert segment_ids(()).shape == value_positions(()).shape == final_value_positions(()).shape == (0,)
    assert segment_rows(TOKENS, LENGTHS).tolist() == [[1, 2, 0], [0, 0, 0], [3, 4, 5], [6, 0, 0]]
    assert last_indices((2, 3, 1)).tolist() == [1, 4, 5]
    with pytest.raises(ValueError, match="response 1 of 4 is empty"):
        last_indices(LENGTHS)


def test_a_sum_over_a_response_is_of_its_own_tokens_in_value_and_gradient():
    x = TOKENS.clone().requires_grad_()
    found = segment_sum(x, LENGTHS)
    assert found.tolist() == [3, 0, 12, 6]
    assert torch.autograd.grad(found[2], x)[0].tolist() == [0, 0, 1, 1, 1, 0]
    assert segment_sum(TOKENS.long(), LENGTHS).dtype is torch.long
    with pytest.raises((IndexError, RuntimeError)):
        segment_sum(TOKENS, (2, 3))


@pytest.mark.parametrize("num_columns", [1, 511, 512, 513, 5000])
def test_running_sums_by_products_are_those_of_a_loop(num_columns: int) -> None:
    x = torch.randn(3, num_columns, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = x.numpy().cumsum(axis=1)
    for found in (running_sums(x), sums_by_products(x)):
        assert found.shape == x.shape
        torch.testing.assert_close(found.numpy(), expected, rtol=1e-12, atol=1e-11)
