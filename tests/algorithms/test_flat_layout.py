"""The flat layout against plain Python slices."""

import pytest
import torch

from proximo.algorithms.masking import (
    final_value_positions,
    last_indices,
    segment_ids,
    segment_rows,
    segment_sum,
    token_positions,
    value_positions,
)

LENGTHS = (2, 0, 3, 1)
TOKENS = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], dtype=torch.float64)


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
def test_dtype_is_kept(dtype):
    assert segment_sum(TOKENS.to(dtype), LENGTHS).dtype is dtype
