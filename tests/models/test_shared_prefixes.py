"""Sequences that share a prefix: what is computed once is what each would compute alone, forwards and backwards."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from architectures import ARCHITECTURES, OF_SHARED_PREFIXES, build_architecture, keep_float64
from proximo.models.attention import varlen
from proximo.models.attention.packed import AttentionOptions, PackedLayout, PrefixCopies, band_mask, explicit_attention
from proximo.models.attention.varlen import VarlenAttention
from proximo.models.language import LanguageModel
from proximo.models.packing import PackedResponses, pack_responses
from proximo.models.scalar import HeadStart, ScalarModel, scalar_from_language_model
from proximo_cpu.attention import KernelAttention
from proximo_cpu.library import library

ROWS: dict[str, tuple[tuple[int, ...], tuple[int | None, ...]]] = {
    "one group": ((5, 3, 1, 4), (None, 0, 0, 0)),
    "groups and others, in turn": ((7, 2, 9, 6, 3, 1, 4), (None, 0, None, None, 3, 0, 3)),
    "blocks of keys": ((200, 3, 97, 96, 1, 300), (None, 0, 0, 0, None, 0)),
    "a whole block": ((96, 60, 100), (None, 0, 0)),
}
"""Tokens of each segment, and the prefix that it follows. A tile of the kernel in C has 96 queries or keys."""

WINDOWS = (None, 1, 3, 40, 100, 150)

GROUPS = [[3, 9, 4, 11, 5, 17, 8], [6, 2, 7]]
"""Prompts."""
RESPONSES = [[20, 21, 22, 23, 24, 25], [30, 31], [], [20, 21, 40], [50, 51, 52, 53, 54, 55, 56, 57]]
OF_PROMPT = [0, 1, 0, 1, 0]


def random_heads(lengths: Sequence[int], dtype: torch.dtype, *, width: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, sum(lengths), width) for heads in (4, 2, 2)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def by_definition(
    given: Sequence[Tensor],
    row: tuple[tuple[int, ...], tuple[int | None, ...]],
    options: AttentionOptions,
    gradient: Tensor,
) -> list[Tensor]:
    """Output [1, T, H, K] and gradients, in float64: of every segment with its prefix as one sequence."""
    lengths, prefixes = row
    exact = [each.detach().double().requires_grad_() for each in given]
    pieces = list(zip(*(each.split(list(lengths), dim=2) for each in exact), strict=True))
    outputs = []
    for own, prefix in zip(pieces, prefixes, strict=True):
        whole = own if prefix is None else [torch.cat(pair, dim=2) for pair in zip(pieces[prefix], own, strict=True)]
        mask = band_mask(whole[0].shape[2], options.sliding_window, exact[0].device)
        outputs.append(explicit_attention(whole[0], whole[1], whole[2], mask, options)[:, :, -own[0].shape[2] :])
    output = torch.cat(outputs, dim=2).transpose(1, 2)
    return [output.detach(), *torch.autograd.grad(output, exact, gradient.double())]


def check_attention(
    row: tuple[tuple[int, ...], tuple[int | None, ...]],
    kernel: type[KernelAttention] | type[VarlenAttention] | None,
    options: AttentionOptions,
    *,
    dtype: torch.dtype,
    tolerance: float,
) -> Tensor:
    given = random_heads(row[0], dtype)
    output = PackedLayout(row[0], kernel, prefixes=row[1]).attend(given[0], given[1], given[2], options)
    gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = [output.detach(), *torch.autograd.grad(output, given, gradient)]
    for ours, exact in zip(found, by_definition(given, row, options, gradient), strict=True):
        scale = max(1.0, exact.abs().max().item())
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=tolerance * scale)
    return output


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("window", WINDOWS)
def test_attention_of_torch_is_that_of_whole_sequences(row, window: int | None) -> None:
    for options in (
        AttentionOptions(sliding_window=window),
        AttentionOptions(sliding_window=window, softcap=1.5, scaling=0.7),
        AttentionOptions(sliding_window=window, sinks=torch.tensor([0.0, 1.0, -1.0, 2.0], dtype=torch.float64)),
    ):
        check_attention(row, None, options, dtype=torch.float64, tolerance=1e-12)


@pytest.mark.skipif(library() is None, reason="no kernels in C: no compiler, or PROXIMO_KERNELS is off")
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("window", WINDOWS)
def test_attention_in_c_is_that_of_whole_sequences(row, window: int | None) -> None:
    for softcap in (None, 1.5):
        options = AttentionOptions(sliding_window=window, softcap=softcap)
        output = check_attention(row, KernelAttention, options, dtype=torch.float32, tolerance=1e-5)
        assert type(output.grad_fn).__name__ == "_AttentionBackward"


@pytest.mark.skipif(library() is None, reason="no kernels in C: no compiler, or PROXIMO_KERNELS is off")
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_threads_do_not_change_the_bits_of_shared_rows(row) -> None:
    given = random_heads(row[0], torch.float32)

    def results() -> list[Tensor]:
        output = PackedLayout(row[0], KernelAttention, prefixes=row[1]).attend(*given, AttentionOptions())
        return [output.detach(), *torch.autograd.grad(output.square().sum(), given)]

    expected = results()
    for num_threads in (2, 3, 7):
        torch.set_num_threads(num_threads)
        for _ in range(3):
            assert all(map(torch.equal, results(), expected))


@pytest.mark.skipif(library() is None, reason="no kernels in C: no compiler, or PROXIMO_KERNELS is off")
def test_a_spoilt_member_leaves_the_others_clean_but_not_the_gradient_of_the_prefix() -> None:
    lengths, prefixes = (100, 4, 5, 3), (None, 0, 0, None)
    given = random_heads(lengths, torch.float32)
    with torch.no_grad():
        given[2][:, :, 100:104] = torch.nan
    output = PackedLayout(lengths, KernelAttention, prefixes=prefixes).attend(*given, AttentionOptions())
    assert output[:, 100:104].isnan().all()
    assert not output[:, :100].isnan().any()
    assert not output[:, 104:].isnan().any()
    gradients = torch.autograd.grad(output.sum(), given)
    assert gradients[1][:, :, :100].isnan().any()
    assert not any(each[:, :, 104:].isnan().any() for each in gradients)


def emulated(ends_together: bool) -> Callable[..., Tensor]:
    """torch's varlen kernel, written out. FlashAttention before 2.1 aligned the first query with the first key."""

    def kernel(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_bounds: Tensor,
        key_bounds: Tensor,
        *longest: int,
        scale: float | None,
        window_size: tuple[int, int],
        enable_gqa: bool,
    ) -> Tensor:
        del enable_gqa
        assert longest == (query_bounds.diff().max(), key_bounds.diff().max())
        window = None if window_size[0] < 0 else window_size[0] + 1
        outputs = []
        pairs = (list(pairwise(each.tolist())) for each in (query_bounds, key_bounds))
        for (q_begin, q_end), (k_begin, k_end) in zip(*pairs, strict=True):
            heads = [
                each[begin:end].transpose(0, 1)[None].double()
                for each, begin, end in ((query, q_begin, q_end), (key, k_begin, k_end), (value, k_begin, k_end))
            ]
            mask, count = band_mask(k_end - k_begin, window, query.device), q_end - q_begin
            mask = mask[-count:] if ends_together else mask[:count]
            options = AttentionOptions(scaling=scale)
            outputs.append(explicit_attention(*heads, mask, options)[0].transpose(0, 1))
        return torch.cat(outputs).to(query.dtype)

    return kernel


class OnCPU(VarlenAttention):
    """Asked for any tensors."""

    def __init__(self, lengths: tuple[int, ...], prefixes: tuple[int | None, ...] = ()) -> None:
        super().__init__(lengths, prefixes)
        self._is_right = varlen.is_right(torch.device("cpu"), grouped=False)

    def fits(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> bool:
        del query, key, value
        return options.is_plain and self._is_right


@pytest.fixture
def kernel_that(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    def put(ends_together: bool) -> None:
        monkeypatch.setattr(varlen, "varlen_kernel", lambda: emulated(ends_together))
        monkeypatch.setattr(varlen, "is_right", varlen.is_right.__wrapped__)

    return put


@pytest.mark.parametrize("row", list(ROWS.values())[:2], ids=list(ROWS)[:2])
@pytest.mark.parametrize("window", [None, 1, 3])
def test_the_varlen_kernel_gets_a_copy_of_the_prefix_for_every_segment(kernel_that, row, window: int | None) -> None:
    kernel_that(ends_together=True)
    check_attention(row, OnCPU, AttentionOptions(sliding_window=window), dtype=torch.float64, tolerance=1e-12)


def test_a_varlen_kernel_that_aligns_the_first_tokens_is_not_used(kernel_that, monkeypatch: pytest.MonkeyPatch) -> None:
    row = ROWS["one group"]
    kernel_that(ends_together=False)
    assert not varlen.is_right(torch.device("cpu"), grouped=False)
    check_attention(row, OnCPU, AttentionOptions(), dtype=torch.float64, tolerance=1e-12)
    monkeypatch.setattr(varlen, "is_right", lambda *_, **__: True)
    with pytest.raises(AssertionError, match="not close"):
        check_attention(row, OnCPU, AttentionOptions(), dtype=torch.float64, tolerance=1e-12)


@pytest.mark.parametrize("knows", [True, False])
def test_grouped_heads_are_tried_out_where_the_kernel_is_not_told_of_them(monkeypatch, knows: bool) -> None:
    """torch 2.11 hands grouped heads on as they are. A kernel that cannot take them is not used for them."""
    told = emulated(ends_together=True)

    def untold(query: Tensor, key: Tensor, value: Tensor, *bounds: Any, scale: Any, window_size: Any) -> Tensor:
        if not knows and query.shape[1] != key.shape[1]:
            raise RuntimeError("key and value must have as many heads as query")
        return told(query, key, value, *bounds, scale=scale, window_size=window_size, enable_gqa=True)

    monkeypatch.setattr(varlen, "varlen_kernel", lambda: untold)
    try_out, device = varlen.is_right.__wrapped__, torch.device("cpu")
    assert try_out(device, grouped=False)
    assert try_out(device, grouped=True) is knows
    monkeypatch.setattr(varlen, "is_right", try_out)
    assert varlen.names_grouped_heads(told)
    assert not varlen.names_grouped_heads(untold)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the varlen kernel needs a CUDA device")
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("window", [None, 3, 100])
def test_the_varlen_kernel_of_a_gpu_agrees_with_whole_sequences(row, window: int | None) -> None:
    options = AttentionOptions(sliding_window=window)
    given = [each.detach().cuda().requires_grad_() for each in random_heads(row[0], torch.bfloat16, width=16)]
    assert VarlenAttention(*row).fits(given[0], given[1], given[2], options)
    output = PackedLayout(row[0], VarlenAttention, prefixes=row[1]).attend(given[0], given[1], given[2], options)
    gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    found = [output.detach(), *torch.autograd.grad(output, given, gradient)]
    on_host = [each.detach().cpu() for each in given]
    for ours, exact in zip(found, by_definition(on_host, row, options, gradient.cpu()), strict=True):
        torch.testing.assert_close(ours.double().cpu(), exact, rtol=0, atol=0.02 * max(1.0, exact.abs().max().item()))


def test_gradients_of_copies_in_half_precision_are_summed_in_single() -> None:
    """Of 16 copies with 1 and with 1/256 in turn, a sum in bf16 keeps none of the small ones."""
    lengths, prefixes = (1, *[1] * 16), (None, *[0] * 16)
    row = torch.zeros(len(lengths), dtype=torch.bfloat16, requires_grad=True)
    copied = PrefixCopies(lengths, prefixes).added(row, dim=0)
    gradient = torch.tensor([0.0, *[1.0, 9.0, 1 / 16, 9.0] * 8], dtype=torch.bfloat16)
    (found,) = torch.autograd.grad(copied, row, gradient)
    assert found[0].item() == 8.5
    assert found[1:].tolist() == [9.0] * 16


@pytest.fixture
def dtype_throughout(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_float64(monkeypatch)


def whole_batch() -> PackedResponses:
    return pack_responses([GROUPS[i] for i in OF_PROMPT], RESPONSES)


def gradients_of(module: nn.Module, total: Tensor) -> dict[str, Tensor]:
    module.zero_grad()
    total.backward()
    return {name: weight.grad.clone() for name, weight in module.named_parameters() if weight.grad is not None}


def compare(found: dict[str, Tensor], alone: dict[str, Tensor], dtype: torch.dtype) -> None:
    assert found.keys() == alone.keys()
    bound = 1e-10 if dtype is torch.float64 else 1e-5
    whole = torch.cat([each.flatten() for each in alone.values()]).norm()
    for name, expected in alone.items():
        # A gradient that is zero but for rounding, as of a bias of keys, is measured by that of the whole model.
        norm = max(expected.norm(), 1e-2 * whole)
        assert (found[name] - expected).norm() <= bound * norm, name


@pytest.mark.usefixtures("dtype_throughout")
@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [*((name, torch.float64) for name in OF_SHARED_PREFIXES), *((name, torch.float32) for name in ARCHITECTURES)],
)
def test_a_policy_has_the_gradients_of_responses_one_by_one(architecture: str, dtype: torch.dtype) -> None:
    model = LanguageModel(build_architecture(architecture).to(dtype))
    batch = whole_batch()
    assert batch.packed.num_tokens == 6 + 2 + 5 + sum(map(len, RESPONSES))
    weights = torch.linspace(-1, 2, len(batch.targets), dtype=dtype)
    alone = [pack_responses([GROUPS[i]], [response]) for i, response in zip(OF_PROMPT, RESPONSES, strict=True)]
    expected = torch.cat([model.response_logprobs(each).logprobs for each in alone])
    of_alone = gradients_of(model.model, (expected * weights).sum())
    found = model.response_logprobs(batch).logprobs
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10 if dtype is torch.float64 else 2e-5)
    compare(gradients_of(model.model, (found * weights).sum()), of_alone, dtype)


@pytest.mark.usefixtures("dtype_throughout")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("architecture", OF_SHARED_PREFIXES)
def test_a_critic_has_the_gradients_of_responses_one_by_one(architecture: str, dtype: torch.dtype) -> None:
    policy = LanguageModel(build_architecture(architecture).to(dtype))
    model: ScalarModel = scalar_from_language_model(policy, HeadStart.NORMAL)
    batch = whole_batch()
    weights = torch.linspace(-1, 2, len(batch.value_positions), dtype=dtype)
    alone = [pack_responses([GROUPS[i]], [response]) for i, response in zip(OF_PROMPT, RESPONSES, strict=True)]
    expected = torch.cat([model.response_values(each) for each in alone])
    of_alone = gradients_of(model.model, (expected * weights).sum())
    found = model.response_values(batch)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10 if dtype is torch.float64 else 2e-5)
    compare(gradients_of(model.model, (found * weights).sum()), of_alone, dtype)
