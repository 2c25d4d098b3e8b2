"""Fused forward and backward passes of a Llama-like layer: one autograd function before attention and one after it.

They compute the same formulas as the modules that they replace, with fewer operators and half of the memory. Results
that are cheap to recompute (norm outputs, SwiGLU products) are not saved for the backward pass, and many operations are
in place. `fused_layers.py` decides which models run this way. `Norm` is the norm after the last layer.

In a backward pass, `for_x` is the gradient of x. Legend: T packed tokens, R requested rows of them, D width, H query
heads, G key heads, K head width, F width of the gated layer.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from proximo.native.row_kernels import row_kernels_for

aten = torch.ops.aten


def normed(hidden: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """RMS norm: the output w * h * r [T, D], and r = 1 / sqrt(mean(h^2) + epsilon) [T, 1]."""
    if (kernels := row_kernels_for(hidden)) is not None:
        return kernels.norm(hidden, weight, epsilon)
    norms = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
    inverse = norms.square_().div_(hidden.shape[-1]).add_(epsilon).rsqrt_()
    return scaled(hidden, inverse, weight), inverse


def scaled(hidden: Tensor, inverse: Tensor, weight: Tensor) -> Tensor:
    """Recomputes the output w * h * r [T, D] of the RMS norm from r."""
    if (kernels := row_kernels_for(hidden)) is not None:
        return kernels.scale(hidden, inverse, weight)
    return torch.mul(hidden, inverse).mul_(weight)


def norm_gradients(
    gradient: Tensor, hidden: Tensor, inverse: Tensor, weight: Tensor, *, into: Tensor, more: Tensor | None = None
) -> Tensor:
    """Backward pass of the RMS norm w * h * r, for the gradient g [T, D] of its output.

    dw = sum_t r g h and dh = r (w g) - r^3 / D * (sum_d w g h) h. Writes dh + `more` [T, D] to `into`, which may be
    `gradient` itself, and returns dw [D]. `more`: the gradient that reaches h through the residual connection.
    """
    if (kernels := row_kernels_for(hidden)) is not None:
        return kernels.norm_backward(gradient, hidden, inverse, weight, more, into)
    products = gradient * hidden
    hidden_coefficient = torch.mv(products, weight).unsqueeze_(1).mul_(inverse.pow(3)).div_(-hidden.shape[-1])
    for_weight = torch.mv(products.t(), inverse[:, 0])
    torch.mul(gradient, weight, out=into).mul_(inverse).addcmul_(hidden, hidden_coefficient)
    if more is not None:
        into.add_(more)
    return for_weight


def rotate_(heads: Tensor, cosines: Tensor, sines: Tensor) -> None:
    """Apply rotary embeddings in place: each head [a, b] becomes [a cos - b sin, b cos + a sin].

    heads [T, H, K], cosines and sines [T, 1, K / 2].
    """
    if (kernels := row_kernels_for(heads)) is not None:
        return kernels.rotate(heads, cosines, sines, heads, back=False)
    first, second = heads.chunk(2, dim=-1)
    rotated_first = first * sines
    first.mul_(cosines).addcmul_(second, sines, value=-1)
    second.mul_(cosines).add_(rotated_first)
    return None


def rotated_back(gradient: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Backward pass of `rotate_`: rotates the gradient [T, H, K] by the negative angles."""
    result = torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device)
    if (kernels := row_kernels_for(gradient)) is not None:
        kernels.rotate(gradient, cosines, sines, result, back=True)
        return result
    (first, second), (to_first, to_second) = gradient.chunk(2, dim=-1), result.chunk(2, dim=-1)
    torch.mul(first, cosines, out=to_first).addcmul_(second, sines)
    torch.mul(second, cosines, out=to_second).addcmul_(first, sines, value=-1)
    return result


def swiglu(gates: Tensor, ups: Tensor) -> Tensor:
    """SwiGLU: silu(gates) * ups, [T, F]."""
    if (kernels := row_kernels_for(gates)) is not None:
        return kernels.swiglu(gates, ups)
    return functional.silu(gates).mul_(ups)


def swiglu_gradients(
    gradient: Tensor, gates: Tensor, ups: Tensor, *, recompute: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Backward pass of `swiglu`: the gradients of gates and of ups, and its output if `recompute`. All [T, F].

    The gradient of gates overwrites `gradient`.
    """
    if (kernels := row_kernels_for(gates)) is not None:
        product = torch.empty_like(gates) if recompute else None
        return gradient, kernels.swiglu_backward(gates, ups, gradient, product), product
    activated = functional.silu(gates)
    product = activated * ups if recompute else None
    for_ups = activated.mul_(gradient)
    aten.silu_backward.grad_input(gradient.mul_(ups), gates, grad_input=gradient)
    return gradient, for_ups, product


class Projections(torch.autograd.Function):
    """Norm, projections and rotary embeddings: hidden [T, D] -> queries [T, H, K], keys and values [T, G, K]."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes arguments by position
        ctx: Any,
        hidden: Tensor,
        norm: Tensor,
        epsilon: float,
        cosines: Tensor,
        sines: Tensor,
        *linear: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """`linear`: weight and bias (or None) of the projections of queries, keys and values."""
        rows, inverse = normed(hidden, norm, epsilon)
        weights, biases = linear[0::2], linear[1::2]
        sizes = [weight.shape[0] for weight in weights if weight is not None]
        joined = hidden.new_empty(hidden.shape[0], sum(sizes))
        parts = joined.split(sizes, dim=1)
        for part, weight, bias in zip(parts, weights, biases, strict=True):
            assert weight is not None
            if bias is None:
                torch.mm(rows, weight.t(), out=part)
            else:
                torch.addmm(bias, rows, weight.t(), out=part)
        width = 2 * cosines.shape[-1]
        # Queries and keys are neighbours in memory, so that one call rotates the heads of both.
        rotate_(joined[:, : sizes[0] + sizes[1]].unflatten(1, (-1, width)), cosines, sines)
        ctx.save_for_backward(hidden, norm, inverse, cosines, sines, *weights)
        ctx.has_bias = [bias is not None for bias in biases]
        return tuple(part.unflatten(1, (-1, width)) for part in parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, norm, inverse, cosines, sines, *weights = ctx.saved_tensors
        for_query, for_key = (rotated_back(gradient, cosines, sines) for gradient in gradients[:2])
        flat = [gradient.flatten(1) for gradient in (for_query, for_key, gradients[2])]
        needs = ctx.needs_input_grad
        for_linear: list[Tensor | None] = [None] * 6
        if any(needs[5:]):  # the norm's output was not saved: recompute it, but only for gradients of weights
            rows = scaled(hidden, inverse, norm)
            for i, gradient in enumerate(flat):
                for_linear[2 * i] = torch.mm(gradient.t(), rows) if needs[5 + 2 * i] else None
                for_linear[2 * i + 1] = gradient.sum(dim=0) if needs[6 + 2 * i] else None
        if not (needs[0] or needs[1]):
            return None, None, None, None, None, *for_linear
        for_hidden = torch.mm(flat[0], weights[0]).addmm_(flat[1], weights[1]).addmm_(flat[2], weights[2])
        for_norm = norm_gradients(for_hidden, hidden, inverse, norm, into=for_hidden)
        return for_hidden, for_norm if needs[1] else None, None, None, None, *for_linear


class OutputAndGate(torch.autograd.Function):
    """The rest of a layer after attention: output projection, residual sum, norm, SwiGLU and residual sum.

    m = h + a O', x = norm(m), result = m + (silu(x G') * (x U')) W'. hidden [T, D], attended [T, H K] -> [T, D], or
    [R, D] if `rows` [R] are requested. Tokens do not mix after attention, so only those rows are computed.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, attended: Tensor, epsilon: float, rows: Tensor | None, *weights: Tensor
    ) -> Tensor:
        """`weights`: output projection [D, H K], norm [D], gate [F, D], up [F, D] and down [D, F]."""
        output, norm, gate, up, down = weights
        ctx.num_tokens = hidden.shape[0]
        if rows is not None:
            hidden, attended = hidden.index_select(0, rows), attended.index_select(0, rows)
        middle = torch.addmm(hidden, attended, output.t())
        normed_middle, inverse = normed(middle, norm, epsilon)
        gates, ups = torch.mm(normed_middle, gate.t()), torch.mm(normed_middle, up.t())
        result = torch.addmm(middle, swiglu(gates, ups), down.t())
        ctx.save_for_backward(rows, attended, middle, inverse, gates, ups, *weights)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, attended, middle, inverse, gates, ups, *weights = ctx.saved_tensors
        output, norm, gate, up, down = weights
        needs_hidden, needs_attended, _, _, *needs = ctx.needs_input_grad
        for_gates, for_ups, product = swiglu_gradients(torch.mm(gradient, down), gates, ups, recompute=needs[4])
        for_down = None if product is None else torch.mm(gradient.t(), product)
        del product  # [T, F], among the largest temporaries of the backward pass
        for_gate = for_up = None
        if needs[2] or needs[3]:
            normed_middle = scaled(middle, inverse, norm)
            for_gate = torch.mm(for_gates.t(), normed_middle) if needs[2] else None
            for_up = torch.mm(for_ups.t(), normed_middle) if needs[3] else None
        for_middle = torch.mm(for_gates, gate).addmm_(for_ups, up)
        # `more`: the residual connection passes the gradient of the result to m unchanged.
        for_norm = norm_gradients(for_middle, middle, inverse, norm, into=for_middle, more=gradient)
        for_output = torch.mm(for_middle.t(), attended) if needs[0] else None
        for_attended = torch.mm(for_middle, output) if needs_attended else None
        if rows is not None:
            for_middle = _scatter_rows(for_middle, rows, ctx.num_tokens) if needs_hidden else None
            for_attended = None if for_attended is None else _scatter_rows(for_attended, rows, ctx.num_tokens)
        for_norm = for_norm if needs[1] else None
        return for_middle, for_attended, None, None, for_output, for_norm, for_gate, for_up, for_down


def _scatter_rows(rows: Tensor, indices: Tensor, num_tokens: int) -> Tensor:
    """rows [R, D] at distinct indices [R] -> [T, D], with zeros in all other rows."""
    return rows.new_zeros(num_tokens, rows.shape[1]).index_copy_(0, indices, rows)


class Norm(torch.autograd.Function):
    """RMS norm w * h / rms(h) of each row: [R, D] -> [R, D]."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        result, inverse = normed(hidden, weight, epsilon)
        ctx.save_for_backward(hidden, inverse, weight)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, inverse, weight = ctx.saved_tensors
        for_hidden = gradient.new_empty(gradient.shape)
        for_weight = norm_gradients(gradient, hidden, inverse, weight, into=for_hidden)
        return for_hidden, for_weight if ctx.needs_input_grad[1] else None, None
