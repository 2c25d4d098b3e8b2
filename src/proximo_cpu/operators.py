"""The operators of a layer: norms, linear layers with or without an adapter, activations, and their gradients.

An operator names tensors of the model and computes with them. Its backward pass is written out, so that the autograd
functions of `fused_functions.py` save little: what is cheap to compute again is not kept. It holds no state of a pass.

Norms compute in the wider type of rows and weights, and give that of the rows. Products compute in the type of their
inputs, which is that of the weights or bfloat16; then weights are cast once within `casting`, and gradients come out in
the type of the weights.

In a backward pass, `for_x` is the gradient of x, g_x in formulas. Legend: T rows, D width, I and O inputs and outputs
of a linear layer, r rank of an adapter, F width of an activation.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from proximo.models.precision.compute import cast_weight
from proximo_cpu.row_kernels import ACTIVATIONS, is_on_cpu, row_kernels_for

aten = torch.ops.aten


class Gradients:
    """The gradients of some tensors, collected from the operators that read them."""

    def __init__(self, tensors: Sequence[Tensor], needed: Iterable[bool]) -> None:
        """`needed`: for each tensor, whether autograd asks for its gradient."""
        self._tensors = tensors
        self._needed = {id(tensor) for tensor, is_needed in zip(tensors, needed, strict=True) if is_needed}
        self._found: dict[int, Tensor] = {}

    def wants(self, *tensors: Tensor | None) -> bool:
        """True if the gradient of one of them is needed."""
        return any(tensor is not None and id(tensor) in self._needed for tensor in tensors)

    def add(self, tensor: Tensor | None, make: Callable[[], Tensor], where: Any = None) -> None:
        """Add what `make` gives to the gradient of a tensor, or at the indices `where` of it, if that is needed."""
        if tensor is None or id(tensor) not in self._needed:
            return
        known, made = self._found.get(id(tensor)), make().to(tensor.dtype)
        if where is None:
            self._found[id(tensor)] = made if known is None else known.add_(made)
            return
        if known is None:
            known = self._found[id(tensor)] = torch.zeros_like(tensor, memory_format=torch.contiguous_format)
        known[where].add_(made)

    @property
    def all(self) -> tuple[Tensor | None, ...]:
        """For each tensor its gradient, or None."""
        return tuple(self._found.get(id(tensor)) for tensor in self._tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class RMSNorm:
    """(w + offset) * x / rms(x) of each row."""

    weight: Tensor
    epsilon: float
    offset: float = 0.0
    """1 for Gemma, whose weights are distances from 1."""

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors of the model that it reads."""
        return (self.weight,)

    def factor(self) -> Tensor:
        """What a row over its rms is multiplied by, [D]."""
        return self.weight if self.offset == 0 else self.weight + self.offset

    def _wide(self, rows: Tensor) -> Tensor:
        return rows.to(max(rows.dtype, self.weight.dtype, key=lambda dtype: dtype.itemsize))

    def run(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """rows [T, D] -> the output [T, D], and 1 / rms [T, 1] for the backward pass."""
        factor = self.factor()
        if (kernels := row_kernels_for(rows)) is not None:
            return kernels.norm(rows, factor, self.epsilon)
        norms = torch.linalg.vector_norm(self._wide(rows), dim=-1, keepdim=True)
        inverse = norms.square_().div_(rows.shape[-1]).add_(self.epsilon).rsqrt_()
        return self.again(rows, inverse), inverse

    def again(self, rows: Tensor, inverse: Tensor) -> Tensor:
        """The output [T, D] once more."""
        factor = self.factor()
        if (kernels := row_kernels_for(rows)) is not None:
            return kernels.scale(rows, inverse, factor)
        return torch.mul(rows, inverse).mul_(factor).to(rows.dtype)

    def backward(
        self,
        gradient: Tensor,
        rows: Tensor,
        inverse: Tensor,
        found: Gradients,
        *,
        into: Tensor,
        more: Tensor | None = None,
    ) -> Tensor:
        """From the gradient g [T, D] of the output: dw = sum_t r x g and dx = r (w g) - r^3 / D * (sum_d w g x) x.

        Writes dx + `more` [T, D] to `into`, which may be `gradient` itself, and returns it.
        """
        factor = self.factor()
        if (kernels := row_kernels_for(rows)) is not None:
            for_weight = kernels.norm_backward(gradient, rows, inverse, factor, more, into)
            found.add(self.weight, lambda: for_weight)
            return into
        gradient, rows = self._wide(gradient), self._wide(rows)
        factor = factor.to(rows.dtype)
        # With p = g x: coefficient = -r^3 / D * (p . w), dw = p' r, and dx = (g w) r + coefficient x.
        products = gradient * rows
        coefficient = torch.mv(products, factor).unsqueeze_(1).mul_(inverse.pow(3)).div_(-rows.shape[-1])
        found.add(self.weight, lambda: torch.mv(products.t(), inverse[:, 0]))
        # Out of place where the sum is wider than what it is written to.
        made = torch.mul(gradient, factor, out=into if into.dtype is rows.dtype else None)
        made.mul_(inverse).addcmul_(rows, coefficient)
        made = made if more is None else made.add_(more)
        return made if made is into else into.copy_(made)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNorm:
    """w * (x - mean(x)) / std(x) + b of each row."""

    weight: Tensor | None
    bias: Tensor | None
    epsilon: float

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors of the model that it reads."""
        return self.weight, self.bias

    def run(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """rows [T, D] -> the output [T, D], and mean and 1 / std [2, T, 1] for the backward pass."""
        output, *statistics = torch.native_layer_norm(rows, rows.shape[1:], self.weight, self.bias, self.epsilon)
        return output, torch.stack(statistics)

    def again(self, rows: Tensor, statistics: Tensor) -> Tensor:  # noqa: ARG002 - torch's operator makes them anew
        """The output [T, D] once more."""
        return torch.native_layer_norm(rows, rows.shape[1:], self.weight, self.bias, self.epsilon)[0]

    def backward(
        self,
        gradient: Tensor,
        rows: Tensor,
        statistics: Tensor,
        found: Gradients,
        *,
        into: Tensor,  # noqa: ARG002 - torch's operator makes its own memory
        more: Tensor | None = None,
    ) -> Tensor:
        """The gradient of the rows, plus `more` [T, D].

        With x^ = (x - mean) / std: dw = sum_t g x^, db = sum_t g, and dx = (w g - mean(w g) - x^ mean(w g x^)) / std.
        """
        wanted = [True, found.wants(self.weight), found.wants(self.bias)]
        for_rows, for_weight, for_bias = aten.native_layer_norm_backward(
            gradient.contiguous(), rows, rows.shape[1:], statistics[0], statistics[1], self.weight, self.bias, wanted
        )
        found.add(self.weight, lambda: for_weight)
        found.add(self.bias, lambda: for_bias)
        return for_rows if more is None else for_rows.add_(more)


Norm = RMSNorm | LayerNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """LoRA: scaling * B A is added to a matrix."""

    down: Tensor
    """A [r, I]."""
    up: Tensor
    """B [O, r], of a joint matrix all rows."""
    scaling: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """y = x W' + b, where an adapter s B A may be added to W, and W may be some rows of a joint matrix.

    Backwards g_x = g_y (W + s B A), g_W = g_y' x, g_b = sum_t g_y, g_A = s (g_y B)' x and g_B = s g_y' (x A').
    """

    weight: Tensor
    """[O, I], or [I, O] if `transposed`; of a joint matrix all of it."""
    bias: Tensor | None = None
    adapter: Adapter | None = None
    transposed: bool = False
    """GPT-2 keeps its matrices so."""
    rows: slice | None = None
    """The outputs of this layer among those of a joint matrix; None for all."""

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors of the model that it reads."""
        adapter = self.adapter
        return self.weight, self.bias, *((adapter.down, adapter.up) if adapter is not None else ())

    @property
    def num_outputs(self) -> int:
        """The number O of outputs."""
        return self.own_rows(self.weight.t() if self.transposed else self.weight).shape[0]

    def own_rows(self, tensor: Tensor) -> Tensor:
        """The rows of this layer among those of a joint matrix, bias or adapter."""
        return tensor if self.rows is None else tensor[self.rows]

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """W [O, I] in `dtype`, with the adapter added if that is its type.

        The sum is made anew each time, which costs r / T of the product. In bfloat16 it would lose what is small beside
        the base, so there the adapter multiplies by itself.
        """
        adapter = self.adapter
        if adapter is None or adapter.up.dtype is not dtype:
            weight = cast_weight(self.weight, dtype)
            return self.own_rows(weight.t() if self.transposed else weight)
        base = self.own_rows(self.weight.t() if self.transposed else self.weight)
        return torch.addmm(base.to(dtype), self.own_rows(adapter.up), adapter.down, alpha=adapter.scaling)

    def apart(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, float] | None:
        """A [r, I], B [O, r] in `dtype`, and the scaling, of an adapter that `matrix` leaves out."""
        adapter = self.adapter
        if adapter is None or adapter.up.dtype is dtype:
            return None
        return cast_weight(adapter.down, dtype), self.own_rows(cast_weight(adapter.up, dtype)), adapter.scaling

    def run(self, inputs: Tensor, *, out: Tensor | None = None, onto: Tensor | None = None) -> Tensor:
        """inputs [T, I] -> [T, O], written to `out`, or added to `onto` [T, O] in a new tensor."""
        turned = self.matrix(inputs.dtype).t()
        bias = None if self.bias is None else self.own_rows(cast_weight(self.bias, inputs.dtype))
        if onto is not None:
            summed = torch.addmm(onto, inputs, turned)
            return summed if bias is None else summed.add_(bias)
        outputs = torch.mm(inputs, turned, out=out) if bias is None else torch.addmm(bias, inputs, turned, out=out)
        if (apart := self.apart(inputs.dtype)) is not None:
            down, up, scaling = apart
            outputs.addmm_(torch.mm(inputs, down.t()), up.t(), alpha=scaling)
        return outputs

    def for_inputs(self, gradient: Tensor, *, onto: Tensor | None = None) -> Tensor:
        """The gradient [T, I] of the inputs from that of the outputs [T, O]; added to `onto` in place if given."""
        matrix = self.matrix(gradient.dtype)
        total = torch.mm(gradient, matrix) if onto is None else onto.addmm_(gradient, matrix)
        if (apart := self.apart(gradient.dtype)) is not None:
            down, up, scaling = apart
            total.addmm_(torch.mm(gradient, up), down, alpha=scaling)
        return total

    def backward(self, gradient: Tensor, inputs: Tensor | None, found: Gradients) -> None:
        """Collect the gradients of the layer's tensors, from that of its outputs [T, O].

        `inputs` [T, I] may be None if `reads_inputs` is False.
        """
        bias = self.bias
        if bias is not None:
            found.add(bias, lambda: gradient.sum(dim=0, dtype=bias.dtype), self.rows)
        if inputs is None:
            return
        if self.transposed and found.wants(self.weight):
            columns = None if self.rows is None else (slice(None), self.rows)
            found.add(self.weight, lambda: _weight_gradient(inputs, gradient), columns)
        else:
            found.add(self.weight, lambda: _weight_gradient(gradient, inputs), self.rows)
        if (adapter := self.adapter) is not None and found.wants(adapter.down, adapter.up):
            dtype = gradient.dtype
            # `low` is s g_y B [T, r] and `projected` s x A' [T, r]: neither B A nor its gradient is made, [O, I] both.
            low = torch.mm(gradient, self.own_rows(cast_weight(adapter.up, dtype))).mul_(adapter.scaling)
            found.add(adapter.down, lambda: torch.mm(low.t(), inputs))
            projected = torch.mm(inputs, cast_weight(adapter.down, dtype).t()).mul_(adapter.scaling)
            found.add(adapter.up, lambda: torch.mm(gradient.t(), projected), self.rows)

    def reads_inputs(self, found: Gradients) -> bool:
        """True if `backward` needs the inputs."""
        adapter = self.adapter
        return found.wants(self.weight) or (adapter is not None and found.wants(adapter.down, adapter.up))


def _weight_gradient(first: Tensor, second: Tensor) -> Tensor:
    """first [T, O], second [T, I] -> the sum over tokens [O, I]. In float32 where the device adds bf16 products so."""
    wide = not is_on_cpu(first) and first.dtype is torch.bfloat16
    return torch.mm(first.t(), second, out_dtype=torch.float32) if wide else torch.mm(first.t(), second)


def for_inputs(layers: Sequence[Linear], gradients: Sequence[Tensor]) -> Tensor:
    """The gradient [T, I] of the inputs that several layers share, from those of their outputs."""
    total = layers[0].for_inputs(gradients[0])
    for layer, gradient in zip(layers[1:], gradients[1:], strict=True):
        layer.for_inputs(gradient, onto=total)
    return total


def _gelu(values: Tensor) -> Tensor:
    return functional.gelu(values, approximate="tanh")


def _relu_backward(gradient: Tensor, values: Tensor) -> Tensor:
    return aten.threshold_backward(gradient, values, 0)


_ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "silu": (functional.silu, aten.silu_backward),
    "gelu_tanh": (_gelu, partial(aten.gelu_backward, approximate="tanh")),
    "gelu": (functional.gelu, aten.gelu_backward),
    "relu": (functional.relu, _relu_backward),
}
"""Name -> the function, and (gradient of its result, its argument) -> gradient of the argument."""


@dataclass(frozen=True, slots=True)
class Activation:
    """y = a(x), or y = a(gates) * ups of a gated layer.

    Backwards g_gates = g_y * ups * a'(gates) and g_ups = g_y * a(gates).
    """

    name: str
    """A key of `_ACTIVATIONS`."""

    def run(self, opened: Sequence[Tensor]) -> Tensor:
        """`opened`: x, or gates and ups, [T, F] each -> [T, F]."""
        gates, ups = opened[0], opened[1] if len(opened) == 2 else None
        if self.name in ACTIVATIONS and (kernels := row_kernels_for(gates)) is not None:
            return kernels.activate(self.name, gates, ups)
        activated = _ACTIVATIONS[self.name][0](gates)
        return activated if ups is None else activated.mul_(ups)

    def backward(
        self, gradient: Tensor, opened: Sequence[Tensor], *, recompute: bool
    ) -> tuple[list[Tensor], Tensor | None]:
        """The gradients of `opened`, and the output once more if `recompute`. May overwrite `gradient`."""
        gates, ups = opened[0], opened[1] if len(opened) == 2 else None
        if self.name in ACTIVATIONS and (kernels := row_kernels_for(gates)) is not None:
            product = torch.empty_like(gates) if recompute else None
            for_ups = kernels.activate_backward(self.name, gates, ups, gradient, product)
            return [gradient] if for_ups is None else [gradient, for_ups], product
        function, of_argument = _ACTIVATIONS[self.name]
        if ups is None:
            return [of_argument(gradient, gates)], function(gates) if recompute else None
        activated = function(gates)
        product = activated * ups if recompute else None
        for_ups = activated.mul_(gradient)
        return [of_argument(gradient.mul_(ups), gates), for_ups], product
