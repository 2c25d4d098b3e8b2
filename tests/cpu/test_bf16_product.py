"""The product of bf16 operands with float32 results, where the processor has the instruction."""

import pytest
import torch
from torch import Tensor

from proximo.models.precision.products import operand, product
from proximo_cpu import bf16

pytestmark = pytest.mark.skipif(not bf16.has_instruction(), reason="needs gcc and a processor with AVX-512 BF16")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


# A matrix of one column up to several panels of 32, depths beside the 256 of a panel, rows beside the six of a tile.
@pytest.mark.parametrize("columns", [1, 15, 16, 17, 33, 200])
@pytest.mark.parametrize("depth", [2, 18, 254, 256, 258, 1030])
def test_it_is_the_product_of_the_operands(columns: int, depth: int) -> None:
    for rows in (1, 5, 6, 13):
        first, second = drawn(rows, depth), drawn(columns, depth, seed=1)
        expected = first.double() @ second.double().t()
        scale = first.double().abs() @ second.double().abs().t()
        found = bf16.product(first, second)
        assert found.dtype is torch.float32
        assert ((found - expected).abs() <= 1e-6 * scale).all()


def test_bits_do_not_depend_on_threads_or_on_the_other_rows() -> None:
    first, second = drawn(300, 384), drawn(1000, 384, seed=1)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = bf16.product(first, second)
        torch.set_num_threads(3)
        assert bf16.product(first, second).equal(alone)
    finally:
        torch.set_num_threads(threads)
    assert bf16.product(first[7:20], second).equal(alone[7:20])


def test_what_is_not_a_number_stays_so() -> None:
    first, second = drawn(7, 64), drawn(40, 64, seed=1)
    first[2, 5], second[3, 6] = float("nan"), float("inf")
    found = bf16.product(first, second)
    assert found[2].isnan().all()
    assert found[:, 3].isfinite().logical_not().all()
    assert found[0, :3].isfinite().all()


def test_operands_stay_halves_and_odd_widths_are_multiplied_too() -> None:
    for depth in (8, 9):
        first, second = operand(drawn(4, depth).float()), operand(drawn(6, depth, seed=1).float())
        assert first.dtype is torch.bfloat16
        expected = first.float() @ second.float().t()
        torch.testing.assert_close(product(first, second.t()), expected, rtol=1e-5, atol=1e-5)
        back = product(first.t().contiguous().t(), second.t().contiguous())
        torch.testing.assert_close(back, expected, rtol=1e-5, atol=1e-5)


def test_operands_of_two_types_are_multiplied_by_value() -> None:
    """A weight whose type the kernel does not take is rounded to float32 numbers, beside hidden states in bf16."""
    first, second = drawn(4, 8), drawn(6, 8, seed=1)
    expected = first.float() @ second.float().t()
    torch.testing.assert_close(product(first, second.float().t()), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(AssertionError, match="16 bits"):
        bf16.product(first, second.float())
