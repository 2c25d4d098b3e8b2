"""A layer of a Llama-like model in two autograd functions around its attention, and the norm after the last layer.

The same formulas as the modules that they stand for, with fewer operators and half of the memory: what is cheap to
compute again in the backward pass is not kept, and much is done in place. Which models may run this way is decided in
`fused_layers.py`.

Legend: T packed tokens, R rows of them that are asked for, D width, H query heads, G key heads, K head width, F width
of the gated layer.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from proximo.native.row_kernels import row_kernels_for

aten = torch.ops.aten


def normed(hidden: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """A norm's output w * h * r [T, D], and r = 1 / sqrt(mean(h^2) + epsilon) [T, 1]."""
    if (kernels := row_kernels_for(hidden)) is not None:
        return kernels.norm(hidden, weight, epsilon)
    norms = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
    inverse = norms.square_().div_(hidden.shape[-1]).add_(epsilon).rsqrt_()
    return scaled(hidden, inverse, weight), inverse


def scaled(hidden: Tensor, inverse: Tensor, weight: Tensor) -> Tensor:
    """The norm's output again, from r: [T, D]."""
    if (kernels := row_kernels_for(hidden)) is not None:
        return kernels.scale(hidden, inverse, weight)
    return torch.mul(hidden, inverse).mul_(weight)


def norm_gradients(
    gradient: Tensor, hidden: Tensor, inverse: Tensor, weight: Tensor, *, into: Tensor, more: Tensor | None = None
) -> Tensor:
    """From the gradient of w * h * r: that of h [T, D], plus `more`, goes `into`; that of w [D] is returned.

    dw = sum_t r g h and dh = r (w g) - r^3 / D * (sum_d w g h) h. `into` may be `gradient`.
    """
    if (kernels := row_kernels_for(hidden)) is not None:
        return kernels.norm_backward(gradient, hidden, inverse, weight, more, into)
    products = gradient * hidden
    along = torch.mv(products, weight).unsqueeze_(1).mul_(inverse.pow(3)).div_(-hidden.shape[-1])
    for_weight = torch.mv(products.t(), inverse[:, 0])
    torch.mul(gradient, weight, out=into).mul_(inverse).addcmul_(hidden, along)
    if more is not None:
        into.add_(more)
    return for_weight


def rotate_(heads: Tensor, cosines: Tensor, sines: Tensor) -> None:
    """Rotary positions, in place: each head [a, b] becomes [a cos - b sin, b cos + a sin].

    heads [T, H, K], cosines and sines [T, 1, K / 2].
    """
    if (kernels := row_kernels_for(heads)) is not None:
        return kernels.rotate(heads, cosines, sines, heads, back=False)
    first, second = heads.chunk(2, dim=-1)
    turned = first * sines
    first.mul_(cosines).addcmul_(second, sines, value=-1)
    second.mul_(cosines).add_(turned)
    return None


def rotated_back(gradient: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """The gradient before `rotate_` from the one behind it, [T, H, K]: the rotation by the negative angle."""
    result = torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device)
    if (kernels := row_kernels_for(gradient)) is not None:
        kernels.rotate(gradient, cosines, sines, result, back=True)
        return result
    (first, second), (to_first, to_second) = gradient.chunk(2, dim=-1), result.chunk(2, dim=-1)
    torch.mul(first, cosines, out=to_first).addcmul_(second, sines)
    torch.mul(second, cosines, out=to_second).addcmul_(first, sines, value=-1)
    return result


def opened(gates: Tensor, ups: Tensor) -> Tensor:
    """silu(gates) * ups: [T, F]."""
    if (kernels := row_kernels_for(gates)) is not None:
        return kernels.swiglu(gates, ups)
    return functional.silu(gates).mul_(ups)


def gate_gradients(
    gradient: Tensor, gates: Tensor, ups: Tensor, *, again: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """From the gradient of `opened`: those of gates, in its place, and of ups; if asked, `opened` again. All [T, F]."""
    if (kernels := row_kernels_for(gates)) is not None:
        product = torch.empty_like(gates) if again else None
        return gradient, kernels.swiglu_backward(gates, ups, gradient, product), product
    activated = functional.silu(gates)
    product = activated * ups if again else None
    for_ups = activated.mul_(gradient)
    aten.silu_backward.grad_input(gradient.mul_(ups), gates, grad_input=gradient)
    return gradient, for_ups, product


class Projections(torch.autograd.Function):
    """Norm, then queries, keys and values with rotary positions: hidden [T, D] -> [T, H, K], [T, G, K], [T, G, K]."""

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
        """`linear`: weight and bias (or None) of queries, of keys, of values."""
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
        rotate_(joined[:, : sizes[0] + sizes[1]].unflatten(1, (-1, width)), cosines, sines)
        ctx.save_for_backward(hidden, norm, inverse, cosines, sines, *weights)
        ctx.has_bias = [bias is not None for bias in biases]
        return tuple(part.unflatten(1, (-1, width)) for part in parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, norm, inverse, cosines, sines, *weights = ctx.saved_tensors
        for_query, for_key = (rotated_back(each, cosines, sines) for each in gradients[:2])
        flat = [each.flatten(1) for each in (for_query, for_key, gradients[2])]
        needs = ctx.needs_input_grad
        for_linear: list[Tensor | None] = [None] * 6
        if any(needs[5:]):
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
    """What follows attention: its output layer, the residual sum, a norm, and the gated layer with its residual sum.

    m = h + a O', x = norm(m), result = m + (silu(x G') * (x U')) W'. hidden [T, D], attended [T, H K] -> [T, D], or
    [R, D] where only some rows are asked for: everything here works on rows, so no others are computed.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, attended: Tensor, epsilon: float, rows: Tensor | None, *weights: Tensor
    ) -> Tensor:
        """`weights`: of the output layer [D, H K], the norm [D], gate [F, D], up [F, D] and down [D, F]."""
        output, norm, gate, up, down = weights
        ctx.num_tokens = hidden.shape[0]
        if rows is not None:
            hidden, attended = hidden.index_select(0, rows), attended.index_select(0, rows)
        middle = torch.addmm(hidden, attended, output.t())
        given, inverse = normed(middle, norm, epsilon)
        gates, ups = torch.mm(given, gate.t()), torch.mm(given, up.t())
        result = torch.addmm(middle, opened(gates, ups), down.t())
        ctx.save_for_backward(rows, attended, middle, inverse, gates, ups, *weights)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, attended, middle, inverse, gates, ups, *weights = ctx.saved_tensors
        output, norm, gate, up, down = weights
        of_hidden, of_attended, _, _, *needs = ctx.needs_input_grad
        for_gates, for_ups, product = gate_gradients(torch.mm(gradient, down), gates, ups, again=needs[4])
        for_down = None if product is None else torch.mm(gradient.t(), product)
        del product
        for_gate = for_up = None
        if needs[2] or needs[3]:
            given = scaled(middle, inverse, norm)
            for_gate = torch.mm(for_gates.t(), given) if needs[2] else None
            for_up = torch.mm(for_ups.t(), given) if needs[3] else None
        for_middle = torch.mm(for_gates, gate).addmm_(for_ups, up)
        for_norm = norm_gradients(for_middle, middle, inverse, norm, into=for_middle, more=gradient)
        for_output = torch.mm(for_middle.t(), attended) if needs[0] else None
        for_attended = torch.mm(for_middle, output) if of_attended else None
        if rows is not None:
            for_middle = _spread(for_middle, rows, ctx.num_tokens) if of_hidden else None
            for_attended = None if for_attended is None else _spread(for_attended, rows, ctx.num_tokens)
        for_norm = for_norm if needs[1] else None
        return for_middle, for_attended, None, None, for_output, for_norm, for_gate, for_up, for_down


def _spread(rows: Tensor, places: Tensor, num_tokens: int) -> Tensor:
    """[R, D] -> [T, D] with zeros elsewhere; no place is named twice."""
    return rows.new_zeros(num_tokens, rows.shape[1]).index_copy_(0, places, rows)


class Norm(torch.autograd.Function):
    """w * h / rms(h) of each row: [R, D] -> [R, D]."""

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
