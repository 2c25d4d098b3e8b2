"""The kernels of rows, in float32, against the same formulas of torch's operators in float64.

What rounding may cost is found from the formulas alone: they run in float64 with every operator's result rounded to
float32 (`Rounded`), so that no library's own order of sums has a part in it.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from proximo.models import heads
from proximo.models.heads import OutputHead, token_logprobs
from proximo_cpu import fused_functions, operators
from proximo_cpu.fused_functions import AttentionInputs, LastNorm, OutputAndMLP, Projections, Rest
from proximo_cpu.library import library
from proximo_cpu.operators import Activation, Gradients, Linear, RMSNorm
from proximo_cpu.row_kernels import row_kernels_for

pytestmark = pytest.mark.skipif(library() is None, reason="no compiler for the kernels, or they are switched off")

SHAPES = [(1, 12), (3, 45), (130, 5), (200, 256), (77, 688)]
"""Rows and width: also less than a vector, no multiple of one, less than a block of rows, and work for two threads."""
NAN = float("nan")
UNIT = 2.0**-24
"""Half the unit in the last place of 1: what one rounding to float32 costs at most."""


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def all_of(*found: Any) -> list[Tensor]:
    return [each for each in found if each is not None]


def normed(hidden: Tensor, weight: Tensor) -> list[Tensor]:
    return all_of(*RMSNorm(weight=weight, epsilon=1e-5).run(hidden))


def scaled(hidden: Tensor, weight: Tensor) -> list[Tensor]:
    inverse = hidden.square().mean(dim=-1, keepdim=True).rsqrt()
    return [RMSNorm(weight=weight, epsilon=1e-5).again(hidden, inverse)]


def norm_gradients(hidden: Tensor, weight: Tensor, gradient: Tensor) -> list[Tensor]:
    inverse = hidden.contiguous().square().mean(dim=-1, keepdim=True).rsqrt()
    alone, joined = hidden.new_empty(hidden.shape), gradient.clone(memory_format=torch.contiguous_format)
    norm, found = RMSNorm(weight=weight, epsilon=1e-5), [Gradients([weight], [True]) for _ in range(2)]
    norm.backward(gradient, hidden, inverse, found[0], into=alone)
    norm.backward(joined, hidden, inverse, found[1], into=joined, more=hidden * 3)
    return all_of(alone, joined, *found[0].all, *found[1].all)


def swiglu(gates: Tensor, ups: Tensor) -> list[Tensor]:
    return [Activation("silu").run((gates, ups))]


def swiglu_gradients(gates: Tensor, ups: Tensor, gradient: Tensor) -> list[Tensor]:
    activation = Activation("silu")
    (mine, product), (again, _) = (
        activation.backward(gradient.clone(), (gates, ups), recompute=recompute) for recompute in (True, False)
    )
    return all_of(*mine, product, *again)


def plain(name: str) -> Callable[[Tensor], list[Tensor]]:
    return lambda values: [Activation(name).run((values,))]


def gradients_of(name: str, *, gated: bool) -> Callable[..., list[Tensor]]:
    def run(gates: Tensor, ups: Tensor, gradient: Tensor) -> list[Tensor]:
        opened = (gates, ups) if gated else (gates,)
        found, product = Activation(name).backward(gradient.clone(), opened, recompute=True)
        return all_of(*found, product)

    return run


def judged(scores: Tensor, *, entropy: bool) -> list[Tensor]:
    normalisers, logprobs, entropies = (torch.zeros_like(scores[:, 0]) for _ in range(3))
    targets = (torch.arange(len(scores)) * 7) % scores.shape[1]
    heads._statistics(scores.clone(), targets, normalisers, logprobs, entropies if entropy else None)
    return [normalisers, logprobs, entropies]


def score_gradient(scores: Tensor, gradients: Tensor, *, entropy: bool) -> list[Tensor]:
    """From normalisers and entropies of one origin."""
    shares = scores.log_softmax(dim=-1)
    entropies = -(shares.exp() * shares).sum(dim=-1)
    targets = (torch.arange(len(scores)) * 7) % scores.shape[1]
    given = (targets, scores.logsumexp(dim=-1), entropies, gradients[:, 0], gradients[:, 1] if entropy else None)
    return [heads._score_gradient(scores.clone(), *given)]


def turned(heads_: Tensor, angles: Tensor) -> list[Tensor]:
    """Heads among other columns turn in place; gradients that lie head by head are turned into new rows."""
    rows, width = len(heads_), 2 * angles.shape[1]
    cosines, sines = (each[:, None] for each in torch.cat([angles, angles], dim=1).repeat(1, 2).chunk(2, dim=1))
    cosines, sines = cosines[..., : width // 2].cos(), sines[..., : width // 2].sin()
    joined = heads_.clone()
    fused_functions.rotate_(joined[:, : 3 * width].unflatten(1, (3, width)), cosines, sines)
    by_head = heads_[:, : 2 * width].unflatten(1, (2, width)).transpose(0, 1).contiguous().transpose(0, 1)
    found = fused_functions.rotated_back(by_head, cosines, sines)
    assert found.is_contiguous()
    assert found.shape == (rows, 2, width)
    return [joined, found]


def inputs(rows: int, width: int) -> dict[str, tuple[Callable[..., list[Tensor]], list[Tensor]]]:
    """Operation -> how it is called, and with what."""
    hidden, gradient, weight = drawn(rows, width), drawn(rows, width, seed=1), drawn(width, seed=2)
    gates, ups = 3 * drawn(rows, width, seed=3), drawn(rows, width, seed=4)
    scores = 5 * drawn(rows, width, seed=5)
    half = width // 4
    return {
        "normed": (normed, [hidden, weight]),
        "scaled": (scaled, [hidden, weight]),
        "norm_gradients": (norm_gradients, [hidden, weight, gradient]),
        "turned": (turned, [drawn(rows, 6 * half + 5), drawn(rows, half, seed=6)]),
        "swiglu": (swiglu, [gates, ups]),
        "swiglu_gradients": (swiglu_gradients, [gates, ups, gradient]),
        "gelu": (plain("gelu_tanh"), [gates]),
        "relu": (plain("relu"), [gates]),
        "gelu gradients": (gradients_of("gelu_tanh", gated=False), [gates, ups, gradient]),
        "gated gelu gradients": (gradients_of("gelu_tanh", gated=True), [gates, ups, gradient]),
        "relu gradients": (gradients_of("relu", gated=False), [gates, ups, gradient]),
        "judged": (lambda *given: judged(*given, entropy=False), [scores]),
        "judged with entropy": (lambda *given: judged(*given, entropy=True), [scores]),
        "score_gradient": (lambda *given: score_gradient(*given, entropy=False), [scores, gradient]),
        "score_gradient with entropy": (lambda *given: score_gradient(*given, entropy=True), [scores, gradient]),
    }


OPERATIONS = list(inputs(1, 8))


def by_torch(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> Any:
    with monkeypatch.context() as patch:
        for module, name in (
            (fused_functions, "row_kernels_for"),
            (operators, "row_kernels_for"),
            (heads, "row_operations"),
        ):
            patch.setattr(module, name, lambda _: None)
        return run()


def error(found: Tensor, exact: Tensor) -> float:
    """Root mean square, as a share of that of the right numbers."""
    return ((found.double() - exact).norm() / exact.norm()).item() if exact.any() else found.abs().max().item()


class Rounded(TorchDispatchMode):
    """The result of each operator in float64 is rounded to float32: the roundings of a formula, each made once."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple | list) else [found]:
            if isinstance(each, Tensor) and each.dtype is torch.float64 and 0 not in each.stride():
                each.copy_(each.float())
        return found


def assert_rounded_only(run: Callable[[torch.dtype], list[Tensor]], *, longest_sum: int) -> None:
    """Twice what the roundings of the formula cost, since a kernel may make them elsewhere, and what those within a sum
    of n numbers do: sqrt(n) of them, as they point either way (Higham and Mary, 2019)."""
    found, exact = run(torch.float32), run(torch.float64)
    with Rounded():
        rounded = run(torch.float64)
    for mine, once, right in zip(found, rounded, exact, strict=True):
        assert mine.shape == right.shape
        assert error(mine, right) <= 2 * (error(once, right) + UNIT) + math.sqrt(longest_sum) * UNIT


@pytest.mark.parametrize(("rows", "width"), SHAPES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_kernel_costs_no_more_than_rounding(name: str, rows: int, width: int) -> None:
    run, given = inputs(rows, width)[name]
    sums = {"normed": width, "norm_gradients": max(rows, width), "judged": width, "judged with entropy": width}
    # The slope of GELU is one operator, and so one rounding, for torch, and a dozen for the kernel.
    sums |= dict.fromkeys(("gelu gradients", "gated gelu gradients"), 150)
    assert_rounded_only(lambda dtype: run(*[each.to(dtype) for each in given]), longest_sum=sums.get(name, 1))


@pytest.mark.parametrize(("rows", "width"), [(1, 45), (200, 256), (1031, 61)])
@pytest.mark.parametrize("name", OPERATIONS)
def test_the_number_of_threads_changes_no_bit(name: str, rows: int, width: int) -> None:
    run, given = inputs(rows, width)[name]
    before, found = torch.get_num_threads(), []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            found.append(run(*given))
    finally:
        torch.set_num_threads(before)
    for one, *others in zip(*found, strict=True):
        assert all(torch.equal(one, other) for other in others)


def test_tensors_with_gaps_are_read_where_they_lie() -> None:
    wide = drawn(130, 90)
    every_other, turned_over, one_row = wide[:, ::2], drawn(45, 130).t(), drawn(1, 45).expand(130, 45)
    weight = drawn(45, seed=2)
    for given in (every_other, turned_over, one_row):
        for run, more in ((normed, [weight]), (swiglu, [every_other]), (norm_gradients, [weight, one_row])):
            plain = run(*[each.contiguous() for each in (given, *more)])
            assert all(map(torch.equal, run(given, *more), plain)), run.__name__


def test_gates_far_from_zero_are_open_or_shut() -> None:
    gates = torch.tensor([100.0, -100.0, 30.0, -30.0, 88.5, -87.5, 0.0, -0.0, 1e4, -1e4, 17.0])[None]
    ups, gradient = torch.full_like(gates, 2.0), torch.full_like(gates, 3.0)
    for run, given in ((swiglu, [gates, ups]), (swiglu_gradients, [gates, ups, gradient])):
        for found, exact in zip(run(*given), run(*[each.double() for each in given]), strict=True):
            torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-11)


@pytest.mark.parametrize("strange", [NAN, float("inf"), -float("inf")])
@pytest.mark.parametrize("width", [8, 45, 256])
@pytest.mark.parametrize("name", OPERATIONS)
def test_numbers_that_are_not_finite_are_not_hidden(
    name: str, width: int, strange: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One in any input, in any place of its row: wherever torch finds no number, the kernel finds none."""
    run, given = inputs(3, width)[name]
    for which, tensor in enumerate(given):
        last = tensor.shape[-1] - 1
        for place in {0, min(6, last), last // 2, last}:
            with_one = [each.clone() for each in given]
            with_one[which].view(-1, last + 1)[-1, place] = strange
            ours, theirs = run(*with_one), by_torch(monkeypatch, lambda given=with_one: run(*given))
            for mine, other in zip(ours, theirs, strict=True):
                assert not (mine.isfinite() & ~other.isfinite()).any(), (which, place)
                finite = mine.isfinite() & other.isfinite()
                torch.testing.assert_close(mine[finite], other[finite], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [1e4, 1e38])
def test_scores_far_apart_give_finite_log_probs(size: float) -> None:
    scores = drawn(4, 45)
    scores[:, 3], scores[1, 7], scores[2, 14] = size, -size, size
    for entropy in (False, True):
        assert all(each.isfinite().all() for each in judged(scores, entropy=entropy))
    normalisers, logprobs, entropies = judged(scores, entropy=True)
    assert torch.equal(normalisers[[0, 1, 3]], scores[[0, 1, 3], 3])
    assert logprobs[2] == pytest.approx(-0.693147)
    assert entropies.tolist() == pytest.approx([0, 0, 0.693147, 0], abs=1e-6)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("width", [8, 45, 256])
def test_tokens_that_cannot_come_have_log_prob_minus_infinity_and_no_gradient(
    width: int, entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = drawn(3, width)
    impossible = torch.arange(width) % 7 > 3  # the last vector, too
    impossible[0], impossible[14 % width] = False, True
    scores[:, impossible] = -torch.inf
    ours = judged(scores, entropy=entropy)
    theirs = by_torch(monkeypatch, lambda: judged(scores, entropy=entropy))
    rest = judged(scores[:, ~impossible], entropy=True)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)
    assert ours[1].tolist()[2] == -torch.inf  # its target is token 14
    if entropy:
        torch.testing.assert_close(ours[2], rest[2], rtol=1e-6, atol=1e-6)
    targets = torch.zeros(3, dtype=torch.int64)
    for far in (1.0, 1e30):
        of_both = drawn(2, 3) * far
        given = (targets, ours[0], rest[2], of_both[0], of_both[1] if entropy else None)
        for run in (lambda run: run(), lambda run: by_torch(monkeypatch, run)):
            gradient = run(lambda given=given: heads._score_gradient(scores.clone(), *given))
            assert not gradient[:, impossible].any()
            assert gradient.isfinite().all()


@pytest.mark.parametrize("target", [-1, 9, 2**40])
def test_a_target_that_is_no_token_is_refused(target: int) -> None:
    head = OutputHead(weight=drawn(9, 4))
    with pytest.raises(IndexError, match="not among the 9 tokens"):
        token_logprobs(drawn(3, 4), head, torch.tensor([0, target, 1]))


def test_targets_may_be_a_column_of_something() -> None:
    head, hidden = OutputHead(weight=drawn(9, 4)), drawn(3, 4).requires_grad_()
    table = torch.tensor([[1, 0], [8, 0], [3, 0]])
    found = [token_logprobs(hidden, head, targets).logprobs for targets in (table[:, 0], table[:, 0].clone())]
    assert torch.equal(*found)
    found[0].sum().backward()


def test_a_weight_of_another_width_is_refused() -> None:
    kernels = row_kernels_for(drawn(2))
    assert kernels is not None
    with pytest.raises(AssertionError, match="one weight for each number of a row"):
        kernels.norm(drawn(2, 8), drawn(7), 1e-6)


def test_no_row_at_all_is_no_error() -> None:
    for run, given in inputs(0, 45).values():
        assert all(each.isfinite().all() for each in run(*given))


def test_kernels_are_used_in_float32_and_not_where_operators_are_followed() -> None:
    assert row_kernels_for(drawn(2)) is not None
    assert row_kernels_for(drawn(2).double()) is None
    with FlopCounterMode(display=False):
        assert row_kernels_for(drawn(2)) is None


@pytest.mark.parametrize("rows", [None, torch.tensor([0, 2, 90])])
def test_a_whole_layer_has_the_gradients_of_float64(rows: Tensor | None) -> None:
    def run(dtype: torch.dtype) -> list[Tensor]:
        def leaf(*shape: int, seed: int) -> Tensor:
            return (drawn(*shape, seed=seed) / shape[-1] ** 0.5).to(dtype).requires_grad_()

        hidden, norm = drawn(91, 24).to(dtype).requires_grad_(), leaf(24, seed=1)
        linear = [leaf(*shape, seed=i) for i, shape in enumerate([(24, 24), (24,), (12, 24), (12,), (12, 24), (12,)])]
        weights = [
            leaf(*shape, seed=i) for i, shape in enumerate([(24, 24), (24,), (45, 24), (45, 24), (24, 45), (24,)])
        ]
        angles = drawn(91, 1, 12, seed=8).to(dtype).chunk(2, dim=-1)
        projections = [Linear(weight=linear[i], bias=linear[i + 1]) for i in (0, 2, 4)]
        part = AttentionInputs(
            norm=RMSNorm(weight=norm, epsilon=1e-5),
            projections=(projections[0], projections[1], projections[2]),
            head_norms=None,
            head_width=12,
            dtype=dtype,
        )
        query, key, value = Projections.apply(part, hidden, *angles, *part.tensors)
        shared = torch.cat([key, value], dim=1).transpose(0, 1).contiguous().transpose(0, 1)
        attended = (query * shared).flatten(1)
        output, gate, up, down = (Linear(weight=weights[i]) for i in (0, 2, 3, 4))
        rest = OutputAndMLP(
            output=output,
            after_attention=None,
            before_mlp=RMSNorm(weight=weights[1], epsilon=1e-5),
            opened=(gate, up),
            activation=Activation("silu"),
            closed=down,
            after_mlp=None,
            dtype=dtype,
        )
        last = RMSNorm(weight=weights[5], epsilon=1e-5)
        result = LastNorm.apply(last, Rest.apply(rest, hidden, attended, rows, *rest.tensors), weights[5])
        leaves = [hidden, norm, *linear, *weights]
        return [result, *torch.autograd.grad(result.square().sum(), leaves)]

    assert_rounded_only(run, longest_sum=91)
