"""The product of `csrc/bf16.c` as a function of tensors: bf16 operands, float32 result."""

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from jaxtyping import BFloat16, Float
from torch import Tensor

from proximo_cpu.library import declare, is_plain, library

_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64


def product_for(like: Tensor) -> Callable[[Tensor, Tensor], Tensor] | None:
    """`product`, if it can multiply a tensor like this one; None also where the processor lacks the instruction."""
    return product if is_plain(like) and has_instruction() else None


@cache
def has_instruction() -> bool:
    """Whether the kernels are there, and the processor has the instruction that they need."""
    return (kernels := _kernels()) is not None and kernels.bf16_product(None, None, None, 0, 0, 0, 1) == 0


def product(
    rows: BFloat16[Tensor, "rows inner"], matrix: BFloat16[Tensor, "columns inner"]
) -> Float[Tensor, "rows columns"]:
    """rows [N, D], matrix [V, D] -> rows matrix' [N, V] float32. D is even, and `has_instruction()` is true."""
    rows, matrix = rows.contiguous(), matrix.contiguous()
    (num_rows, depth), num_columns = rows.shape, len(matrix)
    result = torch.empty(num_rows, num_columns)
    kernels = _kernels()
    assert kernels is not None, "has_instruction() says whether there are kernels"
    assert rows.dtype is matrix.dtype is torch.bfloat16, "the kernel reads 16 bits a number"
    assert depth % 2 == 0, "two numbers of a row are one word"
    assert matrix.shape[1] == depth, "rows and matrix of one width"
    kernels.bf16_product(
        *(rows.data_ptr(), matrix.data_ptr(), result.data_ptr()),
        *(num_rows, num_columns, depth, torch.get_num_threads()),
    )
    return result


@cache
def _kernels() -> ctypes.CDLL | None:
    kernels = library()
    if kernels is not None:
        declare(kernels, {"bf16_product": (ctypes.c_int, *[_POINTER] * 3, *[_COUNT] * 4)})
    return kernels
