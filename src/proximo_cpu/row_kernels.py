"""The kernels of `rows.c`, `head.c` and `sample.c`, and the product of few rows of `decode.c`, as functions of tensors.

Tensors are float32 on the CPU, as `kernels_for` checks. Inputs that are not contiguous are copied, unless a function
takes strides.

Legend: T rows, B rows of a decode step, D width, H heads, K head width, C rows of scores, V vocabulary, I and O inputs
and outputs of a layer.
"""

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from proximo.kernels import row_operations
from proximo_cpu.library import declare, is_plain, kernels_for, pointer

_FLOATS = _TOKENS = ctypes.c_void_p
_COUNT = ctypes.c_int64
_NUMBER = ctypes.c_float

_SIGNATURES = {
    "norm_rows": (None, _FLOATS, _FLOATS, _NUMBER, _FLOATS, _FLOATS, _COUNT, _COUNT, _COUNT),
    "scale_rows": (None, _FLOATS, _FLOATS, _FLOATS, _FLOATS, _COUNT, _COUNT, _COUNT),
    "norm_backward_blocks": (_COUNT, _COUNT),
    "norm_backward": (None, *[_FLOATS] * 8, *[_COUNT] * 3),
    "rotate_rows": (
        *(None, _FLOATS, _COUNT, _COUNT, _FLOATS, _COUNT, _COUNT, _FLOATS, _FLOATS),
        *(_COUNT, _NUMBER, _COUNT, _COUNT, _COUNT, _COUNT),
    ),
    "activate_rows": (None, _COUNT, *[_FLOATS] * 3, *[_COUNT] * 2),
    "activate_rows_backward": (None, _COUNT, *[_FLOATS] * 5, *[_COUNT] * 2),
    "token_statistics": (ctypes.c_int, _FLOATS, _TOKENS, *[_FLOATS] * 3, *[_COUNT] * 3),
    "token_statistics_backward": (ctypes.c_int, _FLOATS, _TOKENS, *[_FLOATS] * 4, *[_COUNT] * 3),
    "sample": (None, _FLOATS, *[_TOKENS] * 2, _NUMBER, _TOKENS, _FLOATS, *[_COUNT] * 3),
    "linear_rows": (None, *[_FLOATS] * 4, *[_COUNT] * 5),
}
"""Function -> type of its result, then types of its arguments."""

FEW_ROWS = 64
"""Up to this many rows the kernel's product is faster than torch's."""

ACTIVATIONS = ("silu", "gelu_tanh", "relu")
"""Those of the kernels, in the order of the enumeration in rowwise.h."""


class RowKernels:
    """Each method is one call into C, which releases the GIL. The core calls those of `RowOperations`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        declare(library, _SIGNATURES)
        self._library = library

    def norm(self, hidden: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """hidden [T, D] -> w * h * r [T, D] and r = 1 / sqrt(mean(h^2) + epsilon) [T, 1]."""
        hidden = hidden.contiguous()
        num_rows, width = hidden.shape
        inverse, result = hidden.new_empty(num_rows, 1), torch.empty_like(hidden)
        self._library.norm_rows(
            *(hidden.data_ptr(), _weight(weight, hidden), epsilon, pointer(inverse), result.data_ptr()),
            *(num_rows, width, torch.get_num_threads()),
        )
        return result, inverse

    def scale(self, hidden: Tensor, inverse: Tensor, weight: Tensor) -> Tensor:
        """Recomputes w * h * r [T, D] from r, which `norm` returned."""
        hidden = hidden.contiguous()
        result = torch.empty_like(hidden)
        self._library.scale_rows(
            *(hidden.data_ptr(), _weight(weight, hidden), pointer(inverse), result.data_ptr()),
            *(*hidden.shape, torch.get_num_threads()),
        )
        return result

    def norm_backward(  # noqa: PLR0917 - as the C function
        self, gradient: Tensor, hidden: Tensor, inverse: Tensor, weight: Tensor, more: Tensor | None, into: Tensor
    ) -> Tensor:
        """Backward of `norm`: `gradient` [T, D] is that of w * h * r. Returns the gradient of w [D].

        Writes the gradient of h, plus `more` if given, to `into` [T, D], which may be `gradient`.
        """
        gradient, hidden = gradient.contiguous(), hidden.contiguous()
        more = None if more is None else more.contiguous()
        num_rows, width = hidden.shape
        sums = hidden.new_empty(self._library.norm_backward_blocks(num_rows), width)
        for_weight = hidden.new_empty(width)
        self._library.norm_backward(
            *(gradient.data_ptr(), hidden.data_ptr(), _weight(weight, hidden), pointer(inverse), pointer(more)),
            *(pointer(into), sums.data_ptr(), for_weight.data_ptr(), num_rows, width, torch.get_num_threads()),
        )
        return for_weight

    def rotate(self, heads: Tensor, cosines: Tensor, sines: Tensor, into: Tensor, *, back: bool) -> None:
        """Rotary position embedding, or with `back` its inverse: heads [T, H, K], cosines and sines [T, 1, K / 2].

        `into` may be `heads`. Rows and heads of both may have any strides.
        """
        if heads.stride(2) != 1:
            heads = heads.contiguous()
        if cosines.stride() != sines.stride() or cosines.stride(2) != 1:
            cosines, sines = cosines.contiguous(), sines.contiguous()
        assert into.stride(2) == 1, "the numbers of a head lie side by side"
        num_rows, num_heads, width = heads.shape
        self._library.rotate_rows(
            *(heads.data_ptr(), heads.stride(0), heads.stride(1), into.data_ptr(), into.stride(0), into.stride(1)),
            *(cosines.data_ptr(), sines.data_ptr(), cosines.stride(0), -1.0 if back else 1.0),
            *(num_rows, num_heads, width // 2, torch.get_num_threads()),
        )

    def activate(self, name: str, gates: Tensor, ups: Tensor | None) -> Tensor:
        """a(gates) * ups, or a(gates) without ups. `name`: one of `ACTIVATIONS`."""
        gates, ups = gates.contiguous(), None if ups is None else ups.contiguous()
        result = torch.empty_like(gates)
        self._library.activate_rows(
            *(ACTIVATIONS.index(name), gates.data_ptr(), pointer(ups), result.data_ptr()),
            *(gates.numel(), torch.get_num_threads()),
        )
        return result

    def activate_backward(
        self, name: str, gates: Tensor, ups: Tensor | None, for_gates: Tensor, opened: Tensor | None
    ) -> Tensor | None:
        """Backward of `activate`, whose gradient is in `for_gates`: overwrites it with that of the gates.

        Returns the gradient of ups, if there are any. Writes a(gates) * ups to `opened`, if given.
        """
        gates, ups = gates.contiguous(), None if ups is None else ups.contiguous()
        for_ups = None if ups is None else torch.empty_like(ups)
        self._library.activate_rows_backward(
            *(ACTIVATIONS.index(name), gates.data_ptr(), pointer(ups), pointer(for_gates), pointer(for_ups)),
            *(pointer(opened), gates.numel(), torch.get_num_threads()),
        )
        return for_ups

    def token_statistics(
        self, scores: Tensor, targets: Tensor, normalisers: Tensor, logprobs: Tensor, entropies: Tensor | None
    ) -> None:
        """scores z [C, V], targets [C] int64: writes log sum exp z, log p of the target and the entropy, [C] each.

        Raises IndexError for a target outside the vocabulary.
        """
        targets = _tokens(targets, scores)
        failed = self._library.token_statistics(
            *(pointer(scores), pointer(targets), pointer(normalisers), pointer(logprobs), pointer(entropies)),
            *(*scores.shape, torch.get_num_threads()),
        )
        _check(failed, scores)

    def token_statistics_backward(  # noqa: PLR0917 - as the C function
        self,
        scores: Tensor,
        targets: Tensor,
        normalisers: Tensor,
        entropies: Tensor,
        of_logprobs: Tensor,
        of_entropies: Tensor | None,
    ) -> None:
        """Overwrites scores [C, V] with their gradient, given those of log-probs and entropies [C].

        Raises IndexError for a target outside the vocabulary.
        """
        of_logprobs = of_logprobs.contiguous()
        of_entropies = None if of_entropies is None else of_entropies.contiguous()
        targets = _tokens(targets, scores)
        failed = self._library.token_statistics_backward(
            *(pointer(scores), pointer(targets), pointer(normalisers), pointer(entropies)),
            *(of_logprobs.data_ptr(), pointer(of_entropies), *scores.shape, torch.get_num_threads()),
        )
        _check(failed, scores)

    def sample(
        self, logits: Tensor, *, streams: Tensor, positions: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """logits [B, V], streams and positions [B] int64 -> tokens [B] int64 and their log-probs [B] under the full
        softmax at the temperature; NaN where logits are not finite."""
        logits, streams, positions = (tensor.contiguous() for tensor in (logits, streams, positions))
        for numbers in (streams, positions):
            assert (numbers.dtype, numbers.shape) == (torch.int64, logits.shape[:1]), "one number in int64 for each row"
        tokens, logprobs = torch.empty_like(streams), logits.new_empty(len(logits))
        inputs, results = map(pointer, (logits, streams, positions)), map(pointer, (tokens, logprobs))
        self._library.sample(*inputs, temperature, *results, *logits.shape, torch.get_num_threads())
        return tokens, logprobs

    def reads_few(self, rows: Tensor) -> bool:
        """Whether `linear` multiplies these rows: few contiguous ones, in inference mode."""
        few = torch.is_inference_mode_enabled() and rows.dim() == 2 and len(rows) <= FEW_ROWS
        return few and rows.is_contiguous()

    def linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """rows [B, I], weight [O, I] float32 or bf16, bias [O] -> x W' + b [B, O]; None for rows or weights that the
        kernel does not read."""
        in_bf16 = weight.dtype is torch.bfloat16
        readable = is_plain(weight) and (in_bf16 or weight.dtype is torch.float32)
        readable = readable and all(each is None or each.is_contiguous() for each in (weight, bias))
        if not (self.reads_few(rows) and readable and 0 < rows.shape[1] == weight.shape[1]):
            return None
        result = rows.new_empty(len(rows), len(weight))
        tensors = map(pointer, (rows, weight, bias, result))
        self._library.linear_rows(*tensors, *rows.shape, len(weight), in_bf16, torch.get_num_threads())
        return result


def is_on_cpu(tensor: Tensor) -> bool:
    """Whether this package's own kernels are those of its device."""
    return tensor.device.type == "cpu"


def row_kernels_for(like: Tensor) -> Any:
    """The row kernels: of another device those of its plug-in; None where torch's operators run."""
    if not is_on_cpu(like):
        return row_operations(like)
    library = kernels_for(like)
    return None if library is None else _declared(library)


_declared = cache(RowKernels)


def _tokens(targets: Tensor, scores: Tensor) -> Tensor:
    assert (targets.dtype, targets.shape) == (torch.int64, scores.shape[:1]), "one target in int64 for each row"
    return targets.contiguous()


def _weight(weight: Tensor, hidden: Tensor) -> int | None:
    assert weight.shape == hidden.shape[1:], "one weight for each number of a row"
    assert weight.dtype is hidden.dtype, "weights in the type of the rows"
    return pointer(weight)


def _check(failed: int, scores: Tensor) -> None:
    if failed:
        raise IndexError(f"a target is not among the {scores.shape[1]} tokens of the vocabulary")
