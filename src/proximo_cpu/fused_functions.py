"""Fused forward and backward passes of a layer: one autograd function before attention and one after it.

They compute what the modules of a transformers layer compute, with fewer operators and half of the memory. Results
that are cheap to recompute (norm outputs, activations) are not saved for the backward pass, and many operations are in
place.

`operators.py` has the operators and their gradients, `model_reader.py` says of which ones the layers of a model
consist, and `fused_layers.py` decides which models run this way. `LastNorm` is the norm after the last layer.

The tensors of the operators are arguments of the functions only so that autograd knows of them.

Legend: T packed tokens, R requested rows of them, D width, H query heads, G key heads, K head width, F width between
the two products of the second half. In the comments g_x is the gradient of x, and n' the backward pass of a norm n.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from proximo.models.precision.compute import current_casts, using_casts
from proximo_cpu.operators import Activation, Gradients, Linear, Norm, RMSNorm, for_inputs
from proximo_cpu.row_kernels import is_on_cpu, row_kernels_for


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionInputs:
    """What comes before attention: norm, projections, norms of queries and keys, rotary embeddings."""

    norm: Norm | None
    projections: tuple[Linear, Linear, Linear]
    """Of queries, keys and values."""
    head_norms: tuple[RMSNorm, RMSNorm] | None
    """Of queries and keys: of each head if their weights are K wide, otherwise of all heads of a token together."""
    head_width: int
    dtype: torch.dtype
    """Of the operands of products. All else is in the type of the hidden states."""
    narrow_heads: bool = False
    """Queries, keys and values stay in that type too: the device attends in it, and multiplies any number of rows."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the model that these parts read, each once."""
        return distinct_tensors(self.norm, *self.projections, *(self.head_norms or ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputAndMLP:
    """What comes after attention: m = h + norm(a O'), and m + norm(mlp(norm(m))). Each norm may be missing."""

    output: Linear
    after_attention: Norm | None
    before_mlp: Norm | None
    opened: tuple[Linear, ...]
    """Gate and up of a gated layer, or the first matrix of a plain one."""
    activation: Activation
    closed: Linear
    after_mlp: Norm | None
    dtype: torch.dtype
    """Of the operands of products, and of what is kept between them."""
    narrow_heads: bool = False
    """As in `AttentionInputs`."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the model that these parts read, each once."""
        norms = (self.after_attention, self.before_mlp, self.after_mlp)
        return distinct_tensors(self.output, *norms, *self.opened, self.closed)


def distinct_tensors(*parts: Linear | Norm | None) -> tuple[Tensor, ...]:
    """The tensors of some parts, each once."""
    tensors = chain.from_iterable(part.tensors for part in parts if part is not None)
    return tuple({id(tensor): tensor for tensor in tensors if tensor is not None}.values())


def operand(rows: Tensor, part: AttentionInputs | OutputAndMLP) -> Tensor:
    """rows [T, I] as an operand of products: cast, and then, on a CPU, with rows of zeros behind them.

    oneDNN compiles a product in bfloat16 for each number of rows, and keeps some 200 KiB of it. So numbers are rounded
    up to one of eight to sixteen between two powers of two, which adds 3% to 6% to products.
    """
    if rows.dtype is part.dtype or part.narrow_heads:
        return rows.to(part.dtype)
    num_rows = rows.shape[0]
    unit = max(64, 1 << (num_rows // 16).bit_length())
    padded = rows.new_empty(-(-num_rows // unit) * unit, rows.shape[1], dtype=part.dtype)
    padded[:num_rows].copy_(rows)
    padded[num_rows:].zero_()
    return padded


def _normed(norm: Norm | None, rows: Tensor, part: AttentionInputs | OutputAndMLP) -> tuple[Tensor, Tensor | None]:
    """n(rows) as an operand of products, and the statistics of the norm."""
    if norm is None:
        return operand(rows, part), None
    if not is_on_cpu(rows) and isinstance(norm, RMSNorm) and (kernels := row_kernels_for(rows)) is not None:
        return kernels.norm(rows, norm.factor(), norm.epsilon, part.dtype)
    normed, statistics = norm.run(rows)
    return operand(normed, part), statistics


def _normed_again(norm: Norm | None, rows: Tensor, statistics: Tensor, part: AttentionInputs | OutputAndMLP) -> Tensor:
    """The first result of `_normed` once more."""
    if norm is None:
        return operand(rows, part)
    if not is_on_cpu(rows) and isinstance(norm, RMSNorm) and (kernels := row_kernels_for(rows)) is not None:
        return kernels.scale(rows, statistics, norm.factor(), part.dtype)
    return operand(norm.again(rows, statistics), part)


def result(rows: Tensor, *, like: Tensor) -> Tensor:
    """The result of a product [T, O], in the type of `like` [T, ...], and without the rows that `operand` added."""
    return rows if rows.dtype is like.dtype else rows[: like.shape[0]].to(like.dtype)


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
    """Backward pass of `rotate_`: rotates the gradient [T, H, K] by the negative angles.

    Angles of less than K / 2 numbers leave the rest of a head as it is.
    """
    width = 2 * cosines.shape[-1]
    turned = torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device)
    if width < gradient.shape[-1]:
        turned[..., width:] = gradient[..., width:]
    gradient, rotated = gradient[..., :width], turned[..., :width]
    if (kernels := row_kernels_for(gradient)) is not None:
        kernels.rotate(gradient, cosines, sines, rotated, back=True)
        return turned
    (first, second), (to_first, to_second) = gradient.chunk(2, dim=-1), rotated.chunk(2, dim=-1)
    torch.mul(first, cosines, out=to_first).addcmul_(second, sines)
    torch.mul(second, cosines, out=to_second).addcmul_(first, sines, value=-1)
    return turned


class Projections(torch.autograd.Function):
    """hidden [T, D] -> queries [T, H, K], keys and values [T, G, K].

    x = n(h), and for each of the three y = x W' + b; queries and keys then n_head(y), and rotated by their positions.
    """

    @staticmethod
    def forward(
        ctx: Any, part: AttentionInputs, hidden: Tensor, cosines: Tensor | None, sines: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """`tensors`: `part.tensors`. Without angles nothing is rotated."""
        ctx.casts = current_casts()
        rows, statistics = _normed(part.norm, hidden, part)
        sizes = [layer.num_outputs for layer in part.projections]
        joined = rows.new_empty(rows.shape[0], sum(sizes))
        for layer, piece in zip(part.projections, joined.split(sizes, dim=1), strict=True):
            layer.run(rows, out=piece)
        joined = joined[: hidden.shape[0]] if part.narrow_heads else result(joined, like=hidden)
        pieces = joined.split(sizes, dim=1)
        raw, of_heads = None, []
        # Queries and keys are neighbours in memory, so that one call rotates the heads of both.
        rotating = [joined[:, : sizes[0] + sizes[1]]]
        if part.head_norms is not None:
            raw, of_heads, rotating = pieces[:2], [], []
            for norm, piece in zip(part.head_norms, raw, strict=True):
                normed, inverse = norm.run(piece.reshape(-1, len(norm.weight)))
                rotating.append(normed.view(piece.shape))
                of_heads.append(inverse)
            pieces = (*rotating, pieces[2])
        if cosines is not None and sines is not None:
            for each in rotating:
                rotate_(each.unflatten(1, (-1, part.head_width))[..., : 2 * cosines.shape[-1]], cosines, sines)
        ctx.part = part
        ctx.save_for_backward(hidden, statistics, cosines, sines, *(raw or ()), *of_heads, *tensors)
        return tuple(piece.unflatten(1, (-1, part.head_width)) for piece in pieces)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with using_casts(ctx.casts):
            return Projections._backward(ctx, gradients)

    @staticmethod
    def _backward(ctx: Any, gradients: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        part: AttentionInputs = ctx.part
        hidden, statistics, cosines, sines, *others = ctx.saved_tensors
        found = Gradients(part.tensors, ctx.needs_input_grad[4:])
        turned = list(gradients)
        # A rotation is orthogonal: its backward pass turns by the negative angle.
        if cosines is not None:
            turned[:2] = [rotated_back(gradient, cosines, sines) for gradient in gradients[:2]]
        flat = [gradient.flatten(1) for gradient in turned]
        # g_y = n_head'(g), for each head or for all of a token, as the norm ran.
        if part.head_norms is not None:
            raw, of_heads = others[:2], others[2:4]
            for i, norm in enumerate(part.head_norms):
                shape = flat[i].shape
                given, values = (each.reshape(-1, len(norm.weight)) for each in (flat[i], raw[i]))
                into = torch.empty_like(given, memory_format=torch.contiguous_format)
                flat[i] = norm.backward(given, values, of_heads[i], found, into=into).view(shape)
        flat = [operand(gradient, part) for gradient in flat]
        rows = None
        if any(layer.reads_inputs(found) for layer in part.projections):
            # The norm's output was not saved: recompute it, but only for gradients of weights.
            rows = _normed_again(part.norm, hidden, statistics, part)
        # g_W = g_y' x and g_b = sum over tokens of g_y.
        for layer, gradient in zip(part.projections, flat, strict=True):
            layer.backward(gradient, rows, found)
        # g_h = n'(g_x), with g_x = sum of g_y W over queries, keys and values.
        for_hidden = None
        if ctx.needs_input_grad[1] or (part.norm is not None and found.wants(*part.norm.tensors)):
            for_hidden = result(for_inputs(part.projections, flat), like=hidden)
            if part.norm is not None:
                for_hidden = part.norm.backward(for_hidden, hidden, statistics, found, into=for_hidden)
        return None, for_hidden if ctx.needs_input_grad[1] else None, None, None, *found.all


class Rest(torch.autograd.Function):
    """The rest of a layer after attention: hidden [T, D], attended [T, H K] -> [T, D].

    m = h + n1(a O'), x = n2(m), z = act(x G') * (x U') (or act(x G') without gate), y = m + n3(z C'). The matrices are
    those of `output`, `opened` and `closed`; a norm that is missing gives its argument.

    If `rows` [R] are requested, [R, D]: tokens do not mix after attention, so only those rows are computed.
    """

    @staticmethod
    def forward(
        ctx: Any, part: OutputAndMLP, hidden: Tensor, attended: Tensor, rows: Tensor | None, *tensors: Tensor
    ) -> Tensor:
        """`tensors`: those of the parts, for autograd."""
        ctx.casts, ctx.num_tokens = current_casts(), hidden.shape[0]
        if rows is not None:
            hidden, attended = hidden.index_select(0, rows), attended.index_select(0, rows)
        attended = operand(attended, part)
        middle, of_attention = _add_result(part.output, attended, part.after_attention, hidden)
        inputs, statistics = _normed(part.before_mlp, middle, part)
        opened = [layer.run(inputs) for layer in part.opened]
        summed, of_mlp = _add_result(part.closed, part.activation.run(opened), part.after_mlp, middle)
        ctx.part = part
        ctx.num_opened = len(opened)
        ctx.save_for_backward(rows, attended, middle, statistics, *of_attention, *of_mlp, *opened, *tensors)
        return summed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        with using_casts(ctx.casts):
            return Rest._backward(ctx, gradient)

    @staticmethod
    def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        part: OutputAndMLP = ctx.part
        rows, attended, middle, statistics, *others = ctx.saved_tensors
        of_attention, of_mlp, opened = others[:2], others[2:4], others[4 : 4 + ctx.num_opened]
        _, needs_hidden, needs_attended, _, *needed = ctx.needs_input_grad
        found = Gradients(part.tensors, needed)
        # g_c = n3'(g_y) of c = z C', then g_z = g_c C and g_C = g_c' z, where z is made again from gates and ups.
        of_closed = operand(_before_norm(part.after_mlp, gradient, of_mlp, found), part)
        for_product = for_inputs((part.closed,), (of_closed,))
        for_opened, product = part.activation.backward(for_product, opened, recompute=part.closed.reads_inputs(found))
        part.closed.backward(of_closed, product, found)
        del product, for_product, of_closed  # [T, F], among the largest temporaries of the backward pass
        # g_G = g_gates' x and g_U = g_ups' x, where x is made again; g_x = g_gates G + g_ups U.
        if any(layer.reads_inputs(found) for layer in part.opened):
            inputs = _normed_again(part.before_mlp, middle, statistics, part)
        else:
            inputs = None
        for layer, each in zip(part.opened, for_opened, strict=True):
            layer.backward(each, inputs, found)
        del inputs
        for_middle = result(for_inputs(part.opened, for_opened), like=middle)
        del for_opened
        # g_m = g_y + n2'(g_x): the residual connection passes the gradient of the result on unchanged.
        if part.before_mlp is None:
            for_middle.add_(gradient)
        else:
            for_middle = part.before_mlp.backward(for_middle, middle, statistics, found, into=for_middle, more=gradient)
        # g_o = n1'(g_m) of o = a O', then g_O = g_o' a and g_a = g_o O; g_h = g_m.
        of_output = operand(_before_norm(part.after_attention, for_middle, of_attention, found), part)
        part.output.backward(of_output, attended, found)
        for_attended = None
        if needs_attended:
            raw = for_inputs((part.output,), (of_output,))
            for_attended = raw[: middle.shape[0]] if part.narrow_heads else result(raw, like=middle)
        if rows is not None:
            for_middle = _scatter_rows(for_middle, rows, ctx.num_tokens) if needs_hidden else None
            for_attended = None if for_attended is None else _scatter_rows(for_attended, rows, ctx.num_tokens)
        return None, for_middle, for_attended, None, *found.all


def _add_result(
    layer: Linear, inputs: Tensor, norm: Norm | None, onto: Tensor
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
    """onto + norm(x W' + b) [T, D], and what the norm's backward pass needs: its argument and statistics."""
    if norm is None and inputs.dtype is onto.dtype:
        return layer.run(inputs, onto=onto), (None, None)
    raw = layer.run(inputs)
    if norm is None and not is_on_cpu(raw):
        return torch.add(onto, raw), (None, None)
    raw = result(raw, like=onto)
    if norm is None:
        return raw.add_(onto), (None, None)
    normed, statistics = norm.run(raw)
    return normed.add_(onto), (raw, statistics)


def _before_norm(norm: Norm | None, gradient: Tensor, saved: Sequence[Tensor], found: Gradients) -> Tensor:
    """The gradient before the norm of `_add_result`. `gradient` is not overwritten."""
    if norm is None:
        return gradient
    raw, statistics = saved
    into = torch.empty_like(gradient, memory_format=torch.contiguous_format)
    return norm.backward(gradient, raw, statistics, found, into=into)


def _scatter_rows(rows: Tensor, indices: Tensor, num_tokens: int) -> Tensor:
    """rows [R, D] at distinct indices [R] -> [T, D], with zeros in all other rows."""
    return rows.new_zeros(num_tokens, rows.shape[1]).index_copy_(0, indices, rows)


class LastNorm(torch.autograd.Function):
    """The norm of each row: [R, D] -> [R, D]."""

    @staticmethod
    def forward(ctx: Any, norm: Norm, hidden: Tensor, *tensors: Tensor) -> Tensor:
        """`tensors`: those of the norm."""
        normed, statistics = norm.run(hidden)
        ctx.norm = norm
        ctx.save_for_backward(hidden, statistics, *tensors)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, statistics, *_ = ctx.saved_tensors
        norm: Norm = ctx.norm
        found = Gradients(distinct_tensors(norm), ctx.needs_input_grad[2:])
        into = gradient.new_empty(gradient.shape)
        return None, norm.backward(gradient, hidden, statistics, found, into=into), *found.all
