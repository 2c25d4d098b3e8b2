"""Products of bf16 operands with float32 results, as the output layer takes them: against their definition."""

import threading

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from architectures import build_architecture
from dtype_traces import DtypeTrace, aten
from fake_cuda import CUDA, fake_cuda
from proximo.models.heads import OutputHead, full_divergence, token_logprobs
from proximo.models.language import LanguageModel
from proximo.models.packing import pack_responses
from proximo.models.precision import products
from proximo.models.precision.compute import casting
from proximo.models.precision.placement import Precision
from proximo.models.precision.products import narrow_linear
from proximo_cpu import bf16

N, D, V = 9, 16, 40


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.7


def rounded(tensor: Tensor) -> Tensor:
    return tensor.bfloat16().float()


class Rounding(torch.autograd.Function):
    """x W', the operands of all three products rounded: the definition, written down by itself."""

    @staticmethod
    def forward(ctx, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return rounded(rows) @ rounded(weight).T

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        rows, weight = ctx.saved_tensors
        return rounded(gradient) @ rounded(weight), rounded(gradient).T @ rounded(rows)


TARGETS = torch.arange(N) % V


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunk_tokens", [4, 256])
@pytest.mark.parametrize("has_kernel", [False, True])
def test_logprobs_entropy_and_gradients_are_those_of_rounded_operands(
    monkeypatch: pytest.MonkeyPatch, *, has_kernel: bool, bias: bool, softcap: float | None, chunk_tokens: int
) -> None:
    if has_kernel and not bf16.has_instruction():
        pytest.skip("the processor has no product of bf16 operands with float32 results")
    if not has_kernel:
        monkeypatch.setattr(products, "bf16_product", lambda _: None)

    def parameters() -> tuple[Tensor, Tensor, Tensor | None]:
        hidden, weight = drawn(N, D).requires_grad_(), drawn(V, D, seed=1).requires_grad_()
        return hidden, weight, drawn(V, seed=2).requires_grad_() if bias else None

    hidden, weight, shift = ours = parameters()
    head = OutputHead(weight=weight, bias=shift, softcap=softcap, narrow=True)
    found = token_logprobs(hidden, head, TARGETS, temperature=0.8, entropy=True, chunk_tokens=chunk_tokens)
    (found.logprobs.square().sum() + found.entropy.sum()).backward()

    hidden, weight, shift = theirs = parameters()
    raw = Rounding.apply(hidden, weight) if shift is None else Rounding.apply(hidden, weight) + shift
    scores = (raw if softcap is None else softcap * torch.tanh(raw / softcap)) / 0.8
    shares = scores.log_softmax(dim=-1)
    logprobs = shares.gather(1, TARGETS[:, None])[:, 0]
    (logprobs.square().sum() - (shares.exp() * shares).sum()).backward()

    # Sums of 16 and 40 terms in another order; a gradient beside a boundary of bf16 may round the other way.
    torch.testing.assert_close(found.logprobs, logprobs, rtol=1e-5, atol=1e-5)
    for mine, other in zip(ours, theirs, strict=True):
        if mine is not None:
            assert mine.grad.dtype == torch.float32
            assert (mine.grad - other.grad).norm() < 2e-3 * other.grad.norm()


def test_no_operand_is_wider_than_bf16_and_float32_products_differ() -> None:
    # A little beside whole numbers of sixteenths, to which they are rounded: sums of their products are exact, in any
    # order.
    hidden, weight = (
        (drawn(*shape, seed=seed) * 16).round() / 16 * 1.0005 for seed, shape in enumerate([(N, D), (V, D)])
    )
    narrow, wide = (token_logprobs(hidden, OutputHead(weight=weight, narrow=each), TARGETS) for each in (True, False))
    same = token_logprobs(rounded(hidden), OutputHead(weight=rounded(weight)), TARGETS)
    assert narrow.logprobs.equal(same.logprobs)
    assert 0 < (narrow.logprobs - wide.logprobs).abs().max() < 0.1


def test_what_a_sampler_is_given_is_what_the_learner_scores() -> None:
    hidden, head = drawn(N, D), OutputHead(weight=drawn(V, D, seed=1), bias=drawn(V, seed=2), narrow=True)
    with torch.inference_mode():
        sampled = head.logits(hidden).log_softmax(dim=-1).gather(1, TARGETS[:, None])[:, 0]
    scored = token_logprobs(hidden, head, TARGETS).logprobs
    torch.testing.assert_close(sampled, scored, rtol=1e-6, atol=2e-6)


def test_the_full_kl_has_the_gradients_of_rounded_operands() -> None:
    hidden, weight = drawn(N, D).requires_grad_(), drawn(V, D, seed=1).requires_grad_()
    head, other = OutputHead(weight=weight, narrow=True), OutputHead(weight=drawn(V, D, seed=3), narrow=True)
    divergence = full_divergence(hidden, head, drawn(N, D, seed=4), other).kl
    divergence.sum().backward()
    found = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    policy = Rounding.apply(hidden, weight).log_softmax(dim=-1)
    reference = (rounded(drawn(N, D, seed=4)) @ rounded(other.weight).T).log_softmax(dim=-1)
    expected = (policy.exp() * (policy - reference)).sum(dim=-1)
    expected.sum().backward()
    torch.testing.assert_close(divergence, expected, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(found, (hidden.grad, weight.grad), strict=True):
        assert mine is not None
        assert (mine - theirs).norm() < 2e-3 * theirs.norm()


def test_the_weight_is_rounded_once_for_all_that_is_sampled() -> None:
    weight = drawn(V, D)
    head = OutputHead(weight=weight, narrow=True)
    with casting(), DtypeTrace() as trace, torch.inference_mode():
        for seed in range(3):
            head.logits(drawn(2, D, seed=seed))
    assert sum(count for key, count in trace.casts.items() if key[2] == (V, D) and key[-1] == "bf16") == 1


@pytest.mark.filterwarnings("ignore:CUDA is not available")  # so says an autocast of its own
def test_on_cuda_one_kernel_multiplies_halves_and_gives_float32() -> None:
    model = LanguageModel(build_architecture("llama"), precision=Precision.BF16)
    hidden = torch.zeros(5, model.base.config.hidden_size)
    with fake_cuda(model.model), DtypeTrace() as trace:
        raw = narrow_linear(hidden.to(CUDA), model.head.weight, None)
        batch = pack_responses([[3, 4, 5], [6, 7]], [[8, 9], [10, 11, 12]]).to(CUDA)
        logprobs = model.response_logprobs(batch).logprobs
    assert raw.dtype == logprobs.dtype == torch.float32
    assert trace.types[aten.mm] == {("bf16", "bf16")}


def test_wide_operands_are_multiplied_as_they_are_on_every_device() -> None:
    """A head in float32 or float64 comes through the same functions in its backward pass."""
    for dtype in (torch.float32, torch.float64):
        with FakeTensorMode():
            first, second, total = (torch.ones(*shape, dtype=dtype) for shape in ((5, 8), (8, 7), (5, 7)))
            with DtypeTrace() as trace:
                found = products.product(first, second), products.add_product(total, first, second)
        assert [each.dtype for each in found] == [dtype, dtype]
        assert set(trace.types) == {aten.mm, aten.addmm_}


def test_a_sum_of_products_in_bf16_is_made_in_place_on_an_accelerator() -> None:
    """Else the gradient of an output layer would be allocated again for every chunk of positions."""
    with FakeTensorMode():
        first, second = torch.ones(5, 8, dtype=torch.bfloat16), torch.ones(8, 7, dtype=torch.bfloat16)
        total = torch.zeros(5, 7)
        assert products.add_product(total, first, second) is total


def test_cuda_adds_a_product_in_bf16_to_the_sum_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tensor that says that it is on CUDA: `addmm` alone would make a new one."""

    class OnCuda(Tensor):
        is_cuda = True

    def addmm(total: Tensor, first: Tensor, second: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        assert (first.dtype, out_dtype) == (torch.bfloat16, torch.float32)
        return out.add_(first.float() @ second.float())

    monkeypatch.setattr(torch, "addmm", addmm)
    first, second, total = torch.ones(5, 8), torch.ones(8, 7), torch.ones(5, 7)
    found = products.add_product(total, first.bfloat16().as_subclass(OnCuda), second.bfloat16())
    assert found.data_ptr() == total.data_ptr()
    assert total.eq(9).all()


def test_the_precision_says_how_a_head_multiplies_and_float64_is_never_rounded() -> None:
    for precision in (Precision.FLOAT32, Precision.BF16, Precision.BF16_FLOAT32_HEAD):
        model = LanguageModel(build_architecture("llama"), precision=precision)
        assert model.head.narrow is (precision is Precision.BF16)
    hidden, weight = drawn(N, D).double(), drawn(V, D, seed=1).double()
    found = OutputHead(weight=weight, narrow=True).logits(hidden)
    assert found.equal(hidden @ weight.T)
    logprobs = token_logprobs(hidden, OutputHead(weight=weight, narrow=True), TARGETS).logprobs
    torch.testing.assert_close(logprobs, found.log_softmax(-1).gather(1, TARGETS[:, None])[:, 0])


def test_a_full_kl_that_is_recomputed_in_another_thread_casts_no_weight_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As autograd does on an accelerator, in whose thread no `casting` is on."""
    model = LanguageModel(build_architecture("llama"), precision=Precision.BF16)
    cast: list[torch.Size] = []
    plain = products.operand

    def operand(tensor: Tensor) -> Tensor:
        cast.append(tensor.shape)
        return plain(tensor)

    monkeypatch.setattr(products, "operand", operand)
    hidden = torch.randn(9, model.head.weight.shape[1], requires_grad=True)
    with casting():
        divergence = full_divergence(hidden, model.head, hidden.detach() + 1, model.head, chunk_tokens=3).kl.sum()
        backward = threading.Thread(target=divergence.backward)
        backward.start()
        backward.join(timeout=600)
    assert hidden.grad is not None
    assert cast.count(model.head.weight.shape) == 1
