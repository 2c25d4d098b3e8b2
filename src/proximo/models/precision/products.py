"""Products of an output layer: of few rows, and under bf16 of bf16 operands with float32 results.

Sums and results are float32 on every device. CUDA has kernels for it, and a plug-in may have one for the product x W'
(kernels.py); elsewhere operands are rounded to bf16 and multiplied in float32, which is equivalent. Backwards all
operands are rounded too: the gradient of the scores, and the weight or the hidden states that it is multiplied with.
The results, gradients of hidden states or of a weight, are float32 without rounding; so is the gradient of a bias. On
a CPU that multiplies bf16, these gradients are rounded to bf16 chunk by chunk, as in the layers: torch's product rounds
its results.
"""

from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from proximo.kernels import bf16_product, row_operations
from proximo.models.precision.compute import cast_weight, remembered


def operand(tensor: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The tensor rounded to bf16, in the dtype that `product` takes on this device."""
    half = tensor.to(torch.bfloat16)
    return half if _takes_halves(tensor) else half.float()


def weight_operand(weight: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The operand of a weight, made once within `casting` (compute.py). It takes no gradient."""
    with torch.no_grad():
        return remembered(weight, "operand", operand)


def product(
    first: Float[Tensor, "rows inner"], second: Float[Tensor, "inner columns"]
) -> Float[Tensor, "rows columns"]:
    """[N, D] and [D, V], operands both -> [N, V] float32; float64 of a head that is not narrow."""
    if first.dtype is second.dtype is torch.bfloat16:
        if has_kernels_for_all(first):
            return torch.mm(first, second, out_dtype=torch.float32)
        multiply = bf16_product(first)
        if multiply is not None and second.stride(0) == 1 and len(second) % 2 == 0:
            return multiply(first, second.t())
    return _widened(first) @ _widened(second)


def add_product(
    total: Float[Tensor, "rows columns"], first: Float[Tensor, "rows inner"], second: Float[Tensor, "inner columns"]
) -> Float[Tensor, "rows columns"]:
    """total [V, D] float32 plus the product of two operands, in `total` itself."""
    if first.dtype is torch.bfloat16 and isinstance(first, FakeTensor):
        # The same work and memory, without numbers: torch 2.11 cannot follow the sum on fake tensors.
        return torch.mm(first, second, out_dtype=torch.float32, out=total)
    if first.dtype is torch.bfloat16 and first.is_cuda:
        return torch.addmm(total, first, second, out_dtype=torch.float32, out=total)
    return total.addmm_(_widened(first), _widened(second))


def gradient_product(first: Float[Tensor, "rows inner"], second: Float[Tensor, "inner columns"]) -> Tensor:
    """As `product`, for gradients. `second` may be a weight, which is cast once within `casting`."""
    if has_kernels_for_all(first) or not _cpu_multiplies_halves():
        return product(first, second)
    return torch.mm(first.to(torch.bfloat16), cast_weight(second, torch.bfloat16)).float()


@cache
def _cpu_multiplies_halves() -> bool:
    """Whether the processor has instructions for products of bf16 numbers. Others are ten times slower with them."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """rows [..., D], weight [V, D], bias [V] -> x W' + b [..., V].

    float32 rows may have a weight of bf16, and give float32.

    A plug-in may multiply few rows, only in inference mode. Under no_grad it is torch's product: the reference is
    computed under no_grad and the policy is not, and with two kinds of products their logits would differ in the last
    bits, so that the KL of equal models would not be 0.
    """
    kernels = row_operations(rows)
    done = None if kernels is None else kernels.linear(rows, weight, bias)
    if done is not None:
        return done
    widens = weight.dtype is torch.bfloat16 and rows.dtype is torch.float32
    return functional.linear(rows, weight.float() if widens else weight, bias)


def narrow_linear(
    rows: Float[Tensor, "*batch hidden"], weight: Float[Tensor, "vocab hidden"], bias: Float[Tensor, "vocab"] | None
) -> Float[Tensor, "*batch vocab"]:
    """rows [..., D], weight [V, D], bias [V] float32 -> x W' + b [..., V] float32, with gradients for all."""
    if torch.is_inference_mode_enabled() and not has_kernels_for_all(rows):
        rounded = _rounded(rows)
        kernels = row_operations(rounded)
        # torch's product would widen a bf16 weight again for each token
        half = kernels is not None and kernels.reads_few(rounded)
        operand_of_few = cast_weight(weight, torch.bfloat16) if half else remembered(weight, "rounded", _rounded)
        return linear(rounded, operand_of_few, bias)
    flat: Tensor = _NarrowLinear.apply(rows.flatten(0, -2), weight, weight_operand(weight), bias)
    return flat.view(*rows.shape[:-1], -1)


def _rounded(tensor: Tensor) -> Tensor:
    """bf16 numbers in float32."""
    return tensor.to(torch.bfloat16).float()


def _widened(tensor: Tensor) -> Tensor:
    """bf16 numbers in float32; others unchanged, which may be float64."""
    return tensor.float() if tensor.dtype is torch.bfloat16 else tensor


def _takes_halves(tensor: Tensor) -> bool:
    return has_kernels_for_all(tensor) or bf16_product(tensor) is not None


def has_kernels_for_all(tensor: Tensor) -> bool:
    """Whether torch has such products here. Fake tensors, which have no device, count as CUDA."""
    return tensor.is_cuda or isinstance(tensor, FakeTensor)


class _NarrowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, _weight: Tensor, weight_half: Tensor, bias: Tensor | None) -> Tensor:
        rows_half = operand(rows)
        ctx.save_for_backward(rows_half, weight_half)
        raw = product(rows_half, weight_half.t())
        return raw if bias is None else raw.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        half = operand(gradients[0])
        for_rows = product(half, weight) if ctx.needs_input_grad[0] else None
        for_weight = product(half.t(), rows) if ctx.needs_input_grad[1] else None
        return for_rows, for_weight, None, gradients[0].sum(dim=0) if ctx.needs_input_grad[3] else None
