"""Attention in blocks of short sequences against attention over one sequence at a time, and what it costs."""

import random

import pytest
import torch
from torch import Tensor

from proximo.models.attention import packed
from proximo.models.attention.packed import AttentionOptions, PackedLayout, short_fits
from proximo.models.attention.short import PADDING, SLACK, Blocks, is_short
from proximo.models.fake_tensor_profiler import shapes_only

PLAIN = AttentionOptions()


def random_heads(kind: str, lengths: list[int], widths: tuple[int, int], heads: tuple[int, int]) -> list[Tensor]:
    """Queries, keys, values [1, heads, T, K], as layers leave them in memory, and the tensor that they are views of."""
    width, value_width = widths
    shapes = [(heads[0], width), (heads[1], width), (heads[1], value_width)]
    sizes = [each * wide for each, wide in shapes]
    num_tokens = sum(lengths)
    whole = torch.randn(num_tokens, sum(sizes), dtype=torch.float64, requires_grad=True)
    if kind == "by head":
        parts = whole.flatten().split([num_tokens * size for size in sizes])
        return [whole, *(part.view(1, h, num_tokens, w) for part, (h, w) in zip(parts, shapes, strict=True))]
    parts = whole.split(sizes, dim=1)
    found = [part.unflatten(1, (-1, w)).transpose(0, 1)[None] for part, (_, w) in zip(parts, shapes, strict=True)]
    if kind == "strided":  # no head begins at a multiple of its width
        found = [torch.cat([each, each[..., :1]], dim=3)[..., :-1] for each in found]
    return [whole, *found]


@pytest.mark.parametrize("kind", ["by token", "by head", "strided"])
@pytest.mark.parametrize("options", [PLAIN, AttentionOptions(scaling=0.3, sliding_window=3)], ids=["plain", "window"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1), (1, 1)])
def test_blocks_give_outputs_and_gradients_of_one_sequence_at_a_time(kind, options, heads):
    draw = random.Random(f"{kind} {options} {heads}")
    for widths in ((8, 8), (6, 4), (2, 3)):
        lengths = [draw.choice([1, 2, 7, 8, 9, 23]) for _ in range(9)]
        whole, *given = random_heads(kind, lengths, widths, heads)
        weights = torch.randn(1, sum(lengths), heads[0], widths[1], dtype=torch.float64)
        found = []
        for short in (True, False):
            result = PackedLayout(lengths, in_blocks=short).attend(*given, options)
            found.append((result, *torch.autograd.grad((result * weights).sum(), whole)))
        for blocked, single in zip(*found, strict=True):
            torch.testing.assert_close(blocked, single, rtol=1e-12, atol=1e-12)


def test_a_sequence_of_numbers_that_are_none_spoils_no_other():
    lengths = [5, 6, 5]
    whole = torch.randn(1, 2, sum(lengths), 4)
    whole[:, :, 5:11] = float("nan")
    whole.requires_grad_()
    result = PackedLayout(lengths, in_blocks=True).attend(whole, whole, whole, PLAIN)
    gradient = torch.autograd.grad(result[:, [*range(5), *range(11, 16)]].sum(), whole)[0][0, 0]
    assert result[0, 5:11].isnan().all()
    assert not result[0, :5].isnan().any()
    assert not result[0, 11:].isnan().any()
    assert not gradient[:5].isnan().any()
    assert not gradient[11:].isnan().any()


@pytest.mark.parametrize("seed", range(5))
def test_blocks_hold_each_head_of_each_token_once_and_little_else(seed):
    draw = random.Random(seed)
    lengths = [draw.randint(1, 60) for _ in range(40)]
    blocks = Blocks.of(lengths, 3, torch.zeros(1))
    rows = sum(count * length for count, length in blocks.shapes)
    assert len(blocks.tokens) == len(blocks.heads) == rows
    assert blocks.places.unique().numel() == 3 * sum(lengths)
    assert blocks.tokens[blocks.places].tolist() == [t for t in range(sum(lengths)) for _ in range(3)]
    assert blocks.heads[blocks.places].tolist() == [0, 1, 2] * sum(lengths)
    assert blocks.real is not None
    assert blocks.real[blocks.places].all()
    assert blocks.real.sum() == 3 * sum(lengths)
    assert rows <= 3 * sum(PADDING * length + SLACK for length in lengths)
    assert len(blocks.shapes) < 12


def test_sequences_of_one_length_are_one_block_without_padding():
    blocks = Blocks.of([7] * 5, 2, torch.zeros(1))
    assert blocks.shapes == ((10, 7),)
    assert blocks.real is None


def test_a_block_takes_two_products_forward_and_four_back():
    """However many sequences: that is what it is for."""
    names = []

    class Names(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            del types
            names.append(func._overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    whole, *given = random_heads("by token", [9] * 20, (4, 4), (2, 2))
    with Names():
        PackedLayout([9] * 20).attend(*given, PLAIN).sum().backward()
    assert whole.grad is not None
    assert names.count("baddbmm") == 1
    assert names.count("bmm") == 1 + 4
    assert not any("attention" in name for name in names)


@pytest.mark.parametrize(
    ("lengths", "width", "num_threads", "expected"),
    [
        ([16] * 8, 64, 1, True),
        ([31] * 8, 64, 1, True),
        ([32] * 8, 64, 1, False),
        ([48] * 8, 32, 1, True),
        ([49] * 8, 16, 1, False),
        ([96] * 8, 64, 2, True),
        ([97] * 8, 16, 2, False),
        ([16] * 3, 64, 2, False),
        ([8] * 50 + [200], 16, 1, False),  # half of the work is in the long one
        ([30] * 50 + [80], 16, 1, True),
    ],
)
def test_what_is_short(lengths, width, num_threads, expected):
    assert is_short(lengths, width, num_threads) is expected


def test_a_layer_that_is_computed_again_goes_the_way_of_the_first(monkeypatch):
    layout = PackedLayout([9] * 4)
    _, *given = random_heads("by token", [9] * 4, (4, 4), (2, 2))
    first = layout.attend(*given, PLAIN)
    monkeypatch.setattr(packed, "is_short", lambda *_: False)  # as with other threads
    assert type(layout.attend(*given, PLAIN).grad_fn) is type(first.grad_fn)
    assert type(PackedLayout([9] * 4).attend(*given, PLAIN).grad_fn) is not type(first.grad_fn)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_rehearsal_takes_what_holds_more(num_threads, monkeypatch):
    """Which is blocks, for lengths that take them on several threads: it does not know the run's."""
    asked = []
    monkeypatch.setattr(packed, "is_short", lambda *given: asked.append(given[2]) or False)
    monkeypatch.setattr(packed, "native_fits", lambda *_: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    query = torch.zeros(1, 2, 40, 4)
    PackedLayout([10] * 4).attend(query, query, query, PLAIN)
    with shapes_only():
        query = torch.zeros(1, 2, 40, 4)
        PackedLayout([10] * 4).attend(query, query, query, PLAIN)
    assert asked == [num_threads, 2]


@pytest.mark.parametrize(
    ("query", "options"),
    [
        (torch.zeros(1, 1, 2, 4, dtype=torch.bfloat16), PLAIN),
        (torch.zeros(1, 1, 2, 4, device="meta"), PLAIN),
        (torch.zeros(1, 1, 2, 4), AttentionOptions(softcap=1.0)),
        (torch.zeros(1, 1, 2, 4), AttentionOptions(sinks=torch.zeros(1))),
        (torch.zeros(1, 1, 2, 4), AttentionOptions(dropout=0.1)),
    ],
)
def test_what_blocks_do_not_compute_is_left_to_others(query, options):
    assert short_fits(torch.zeros(1, 1, 2, 4), PLAIN)
    assert not short_fits(query, options)


def test_autocast_takes_the_fused_kernel():
    _, *given = (each.float() for each in random_heads("by token", [4, 4], (4, 4), (2, 2)))
    with torch.autocast("cpu", torch.bfloat16):
        result = PackedLayout([4, 4], in_blocks=True).attend(*given, PLAIN)
    expected = PackedLayout([4, 4], in_blocks=True).attend(*given, PLAIN)
    torch.testing.assert_close(result.float(), expected, rtol=0.05, atol=0.05)


def test_one_layout_serves_layers_of_several_types_and_expanded_keys_without_gradients():
    layout = PackedLayout([3, 1, 3, 2], in_blocks=True)
    one = PackedLayout([3, 1, 3, 2], in_blocks=False)
    for dtype in (torch.float32, torch.float64):
        query, key = torch.randn(1, 4, 9, 6, dtype=dtype), torch.randn(1, 1, 9, 6, dtype=dtype).expand(1, 2, 9, 6)
        with torch.inference_mode():
            torch.testing.assert_close(layout.attend(query, key, key, PLAIN), one.attend(query, key, key, PLAIN))
