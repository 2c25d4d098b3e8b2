"""Products of a few rows in slices, against the plain product."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from proximo.models import few_rows
from proximo.models.heads import OutputHead


@pytest.fixture(autouse=True)
def _sliced_whatever_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "SMALLEST_WEIGHTS", 0)
    monkeypatch.setattr(few_rows, "has_threads", lambda _: True)


@pytest.fixture
def _as_it_is(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.undo()
    yield
    torch.set_num_threads(1)


@pytest.fixture
def batched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the batched products."""
    seen: list[tuple[int, ...]] = []
    plain = torch.bmm

    def bmm(first: Tensor, second: Tensor) -> Tensor:
        seen.append(tuple(second.shape))
        return plain(first, second)

    monkeypatch.setattr(torch, "bmm", bmm)
    return seen


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("bias", [None, drawn(12)], ids=["plain", "bias"])
@torch.no_grad()
def test_slices_give_the_product_with_every_output_in_its_place(bias: Tensor | None, batched: list) -> None:
    rows, weight = drawn(5, 6), drawn(12, 6)
    found = few_rows.linear(rows, weight, bias)
    assert batched == [(4, 6, 3)]
    assert torch.allclose(found, functional.linear(rows, weight, bias), rtol=0, atol=1e-12)
    assert found.is_contiguous()


@torch.no_grad()
def test_slices_by_inputs_add_up_to_the_product() -> None:
    rows, weight = drawn(5, 12), drawn(6, 12)
    slices = few_rows.sliced_by_inputs(weight)
    assert slices is not None
    parts = torch.bmm(rows.view(5, 4, 3).transpose(0, 1), slices)
    assert torch.allclose(parts.sum(dim=0), rows @ weight.t(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("rows", "weight"),
    [
        (drawn(1, 6), drawn(12, 6)),
        (drawn(65, 6), drawn(12, 6)),
        (drawn(2, 5, 6), drawn(12, 6)),
        (drawn(5, 6), drawn(13, 6)),
        (drawn(5, 6), drawn(6, 12).t()),
    ],
    ids=["one row", "many rows", "no rows", "outputs that do not divide", "a matrix that lies otherwise"],
)
@torch.no_grad()
def test_everything_else_is_a_plain_product(rows: Tensor, weight: Tensor, batched: list) -> None:
    assert torch.equal(few_rows.linear(rows, weight, None), functional.linear(rows, weight))
    assert batched == []


def test_where_gradients_are_taken_the_product_is_plain(batched: list) -> None:
    rows, weight = drawn(5, 6).requires_grad_(), drawn(12, 6).requires_grad_()
    few_rows.linear(rows, weight, None).sum().backward()
    assert batched == []
    assert weight.grad is not None


@torch.no_grad()
def test_a_head_goes_this_way(batched: list) -> None:
    rows, weight = drawn(5, 6), drawn(12, 6)
    found = OutputHead(weight=weight, softcap=2.0).logits(rows)
    assert batched
    assert torch.allclose(found, 2 * torch.tanh(rows @ weight.t() / 2), rtol=0, atol=1e-12)


@pytest.mark.usefixtures("_as_it_is")
def test_one_thread_or_another_device_has_nothing_to_share_out() -> None:
    torch.set_num_threads(2)
    assert few_rows.has_threads(torch.zeros(1))
    assert not few_rows.has_threads(torch.zeros(1, device="meta"))
    torch.set_num_threads(1)
    assert not few_rows.has_threads(torch.zeros(1))


@pytest.mark.usefixtures("_as_it_is")
@torch.no_grad()
def test_a_rehearsal_takes_what_holds_more_and_small_matrices_are_left_whole() -> None:
    assert torch.get_num_threads() == 1
    with FakeTensorMode(), Batched() as large:
        few_rows.linear(torch.empty(8, 512), torch.empty(512, 512), None)
    with FakeTensorMode(), Batched() as small:
        few_rows.linear(torch.empty(8, 511), torch.empty(512, 511), None)
    assert (large.batched, small.batched) == (1, 0)


class Batched(TorchDispatchMode):
    """How many batched products there were."""

    def __init__(self) -> None:
        super().__init__()
        self.batched = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.batched += func is torch.ops.aten.bmm.default
        return func(*args, **(kwargs or {}))
