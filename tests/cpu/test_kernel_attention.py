"""Attention in C against the definition in float64, and what its bits depend on."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from proximo.models.attention.packed import AttentionOptions, PackedLayout, band_mask, explicit_attention
from proximo.plan.fake_tensor_profiler import shapes_only
from proximo_cpu import attention as cpu_attention
from proximo_cpu.attention import KernelAttention
from proximo_cpu.library import library

PLAIN = AttentionOptions()
LENGTHS = ((1,), (2, 1, 7), (95, 96, 97), (30, 6, 200), (300, 13))
"""Below, at and beyond a tile of 96, of two tiles and of three."""


@pytest.fixture(autouse=True)
def _there_are_kernels() -> None:
    if library() is None:
        pytest.skip("no kernels in C: there is no compiler here, or PROXIMO_KERNELS is off")


def random_heads(lengths: Sequence[int], heads: tuple[int, int], width: int, *, seed: int = 0) -> list[Tensor]:
    """Queries [1, H, T, K], keys and values [1, G, T, K], as a layer leaves them: views of one tensor."""
    generator = torch.Generator().manual_seed(seed)
    counts = [heads[0], heads[1], heads[1]]
    whole = torch.randn(sum(lengths), sum(counts) * width, generator=generator)
    parts = whole.split([count * width for count in counts], dim=1)
    return [part.unflatten(1, (-1, width)).transpose(0, 1)[None].requires_grad_() for part in parts]


def with_gradients(given: Sequence[Tensor], lengths: Sequence[int], options: AttentionOptions = PLAIN) -> list[Tensor]:
    """Output [1, T, H, K], and the gradients from one that differs in every entry."""
    output = PackedLayout(lengths, KernelAttention).attend(given[0], given[1], given[2], options)
    assert was_native(output)
    return [output.detach(), *torch.autograd.grad(output, given, gradient_for(output))]


def was_native(output: Tensor) -> bool:
    return type(output.grad_fn).__name__ == "_AttentionBackward"


def gradient_for(output: Tensor) -> Tensor:
    return torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)


def by_definition(given: Sequence[Tensor], lengths: Sequence[int], options: AttentionOptions) -> list[Tensor]:
    """The same in float64."""
    exact = [each.detach().double().requires_grad_() for each in given]
    parts = zip(*(each.split(list(lengths), dim=2) for each in exact), strict=True)
    masks = [band_mask(length, options.sliding_window, exact[0].device) for length in lengths]
    outputs = [explicit_attention(*each, mask, options) for each, mask in zip(parts, masks, strict=True)]
    output = torch.cat(outputs, dim=2).transpose(1, 2)
    return [output.detach(), *torch.autograd.grad(output, exact, gradient_for(output))]


def is_native(given: Sequence[Tensor], options: AttentionOptions = PLAIN) -> bool:
    output = PackedLayout([given[0].shape[2]], KernelAttention).attend(given[0], given[1], given[2], options)
    return was_native(output)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("width", [1, 12, 20, 64, 100])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2)], ids=str)
def test_outputs_and_gradients_are_those_of_the_definition(lengths, width, heads):
    given = random_heads(lengths, heads, width)
    for window in (None, 1, 3, 40, 100, 150):
        options = AttentionOptions(sliding_window=window, scaling=0.3 if window == 40 else None)
        expected = by_definition(given, lengths, options)
        for ours, exact in zip(with_gradients(given, lengths, options), expected, strict=True):
            torch.testing.assert_close(ours.double(), exact, rtol=0, atol=1e-5 * max(1.0, exact.abs().max().item()))


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("softcap", [0.3, 2.0, 50.0])
@pytest.mark.parametrize("window", [None, 3, 100])
def test_capped_scores_give_outputs_and_gradients_of_the_definition(lengths, softcap, window):
    """From caps that nearly every score reaches to one that none does."""
    given = random_heads(lengths, (4, 2), 20)
    options = AttentionOptions(softcap=softcap, sliding_window=window, scaling=0.5)
    expected = by_definition(given, lengths, options)
    for ours, exact in zip(with_gradients(given, lengths, options), expected, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=1e-5 * max(1.0, exact.abs().max().item()))


def test_rows_that_lie_in_any_way_give_the_same_bits():
    lengths = (7, 100, 33)
    views = random_heads(lengths, (4, 2), 20)
    by_head = [each.detach().contiguous().requires_grad_() for each in views]
    with_gaps = [each.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_() for each in views]
    assert [each.is_contiguous() for each in (views[0], by_head[0], with_gaps[0])] == [False, True, False]
    expected = with_gradients(views, lengths)
    mixed = [by_head[0], views[1], with_gaps[2]], [views[0], by_head[1], views[2]], [views[0], views[1], by_head[2]]
    for other in (by_head, with_gaps, *mixed):
        assert all(map(torch.equal, with_gradients(other, lengths), expected))


def test_a_gradient_that_lies_in_another_way_gives_the_same_bits():
    lengths = (7, 40)
    given = random_heads(lengths, (2, 2), 8)
    expected = with_gradients(given, lengths)
    output = PackedLayout(lengths, KernelAttention).attend(*given, PLAIN)
    gradient = gradient_for(output).transpose(1, 3).contiguous().transpose(1, 3)
    assert not gradient.is_contiguous()
    assert all(map(torch.equal, torch.autograd.grad(output, given, gradient), expected[1:]))


@pytest.mark.parametrize("heads", [(4, 4), (4, 1)], ids=str)
def test_threads_do_not_change_the_bits(heads):
    lengths = (5, 230, 17, 96, 1, 64)
    given = random_heads(lengths, heads, 16)
    expected = with_gradients(given, lengths)
    for num_threads in (2, 3, 7):
        torch.set_num_threads(num_threads)
        for _ in range(5):
            assert all(map(torch.equal, with_gradients(given, lengths), expected))


def test_neighbours_in_the_pack_do_not_change_the_bits():
    lengths = (40, 130, 6)
    given = random_heads(lengths, (4, 2), 16)
    packed = PackedLayout(lengths, KernelAttention).attend(*given, PLAIN)
    found = torch.autograd.grad(packed.square().sum(), given)
    alone = [each[:, :, 40:170].detach().requires_grad_() for each in given]
    output = PackedLayout((130,), KernelAttention).attend(*alone, PLAIN)
    assert output.equal(packed[:, 40:170])
    for whole, single in zip(found, torch.autograd.grad(output.square().sum(), alone), strict=True):
        assert single.equal(whole[:, :, 40:170])


def test_later_tokens_do_not_change_the_bits_of_earlier_ones():
    first, second = random_heads((200,), (2, 1), 16), random_heads((200,), (2, 1), 16, seed=3)
    mixed = [torch.cat([a[:, :, :100], b[:, :, 100:]], dim=2) for a, b in zip(first, second, strict=True)]
    ours, theirs = (PackedLayout((200,), KernelAttention).attend(*given, PLAIN) for given in (first, mixed))
    assert ours[:, :100].equal(theirs[:, :100])
    assert not ours[:, 100:].equal(theirs[:, 100:])


def test_a_pass_without_gradients_computes_the_same_bits():
    given = random_heads((70, 3), (4, 2), 16)
    with torch.inference_mode():
        silent = PackedLayout((70, 3), KernelAttention).attend(*given, PLAIN)
    assert silent.equal(PackedLayout((70, 3), KernelAttention).attend(*given, PLAIN))


@pytest.mark.parametrize("window", [None, 50])
def test_large_scores_stay_finite_and_right(window):
    lengths = (150, 9)
    given = random_heads(lengths, (2, 1), 16)
    with torch.no_grad():
        for each in given[:2]:
            each.mul_(60)
    options = AttentionOptions(sliding_window=window, scaling=1.0)
    scores = given[0][0, 0] @ given[1][0, 0].T
    assert scores.min() < -1e4
    assert scores.max() > 1e4
    expected = by_definition(given, lengths, options)
    for ours, exact in zip(with_gradients(given, lengths, options), expected, strict=True):
        # Nearly every weight is 0 or 1, and so is what moves it: sums of numbers of size 60 that come to nothing.
        assert (ours - exact).abs().max() <= 1e-3 * max(1.0, exact.abs().max().item())


def test_a_sequence_of_numbers_that_are_none_spoils_no_other_and_is_not_mended():
    lengths = (20, 30, 110)
    for spoilt in range(3):
        given = random_heads(lengths, (2, 1), 8)
        with torch.no_grad():
            given[spoilt][:, :, 20:50] = math.nan
        ours = with_gradients(given, lengths)
        assert ours[0][:, 20:50].isnan().all()
        assert not ours[0][:, :20].isnan().any()
        assert not ours[0][:, 50:].isnan().any()
        for gradient in ours[1:]:
            assert not gradient[:, :, :20].isnan().any()
            assert not gradient[:, :, 50:].isnan().any()
        assert ours[1][:, :, 20:50].isnan().all()


def test_one_score_that_is_none_shows():
    """The largest of others and NaN is found among the others."""
    given = random_heads((40,), (1, 1), 8)
    with torch.no_grad():
        given[1][0, 0, 17] = math.nan
    assert (
        PackedLayout((40,), KernelAttention).attend(*given, PLAIN)[0, :, 0, 0].isnan().tolist()
        == [False] * 17 + [True] * 23
    )


def test_what_is_kept_grows_with_the_tokens_alone_and_copies_nothing():
    kept: dict[int, Tensor] = {}

    def hold(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    given = random_heads((500,), (4, 2), 8)
    with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
        output = PackedLayout((500,), KernelAttention).attend(*given, PLAIN)
    assert given[0].untyped_storage().data_ptr() in kept
    assert output.untyped_storage().data_ptr() in kept
    assert sorted(each.numel() for each in kept.values() if each._base is None) == [500 * 4 * 2, 500 * 4 * 8]


def test_what_the_kernel_cannot_compute_goes_the_ways_of_torch():
    given = random_heads((12,), (2, 1), 8)
    assert is_native(given)
    assert is_native(given, AttentionOptions(scaling=2.0, sliding_window=3))
    assert is_native(given, AttentionOptions(softcap=1.0))
    others = (AttentionOptions(sinks=torch.zeros(2)), AttentionOptions(dropout=0.1))
    assert not any(is_native(given, options) for options in others)
    assert not is_native([each.double() for each in given])
    assert not is_native([given[0], given[1], given[2][..., :4]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not is_native(given)
    with FlopCounterMode(display=False):
        assert not is_native(given)
    with shapes_only():
        assert not is_native([torch.empty(each.shape, requires_grad=True) for each in given])


def test_without_kernels_torch_does_the_work(monkeypatch):
    given = random_heads((12,), (2, 1), 8)
    ours = PackedLayout((12,), KernelAttention).attend(*given, PLAIN)
    monkeypatch.setattr(cpu_attention, "kernels_for", lambda _: None)
    assert not is_native(given)
    torch.testing.assert_close(PackedLayout((12,), KernelAttention).attend(*given, PLAIN), ours, rtol=1e-5, atol=1e-6)
