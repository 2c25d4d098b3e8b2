"""Sampling by `sample.c` as a function of tensors."""

import ctypes
from ctypes import c_float, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from proximo.native.library import declare, pointer


def sample(
    kernels: ctypes.CDLL, logits: Tensor, *, streams: Tensor, positions: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """logits [B, V], streams and positions [B] int64 -> tokens [B] int64 and their log-probs [B] under the full softmax
    at the temperature; NaN where logits are not finite."""
    logits, streams, positions = (tensor.contiguous() for tensor in (logits, streams, positions))
    for numbers in (streams, positions):
        assert (numbers.dtype, numbers.shape) == (torch.int64, logits.shape[:1]), "one number in int64 for each row"
    tokens, logprobs = torch.empty_like(streams), logits.new_empty(len(logits))
    inputs, results = map(pointer, (logits, streams, positions)), map(pointer, (tokens, logprobs))
    _declared(kernels).sample(*inputs, temperature, *results, *logits.shape, torch.get_num_threads())
    return tokens, logprobs


@cache
def _declared(kernels: ctypes.CDLL) -> ctypes.CDLL:
    declare(kernels, {"sample": (None, *[c_void_p] * 3, c_float, *[c_void_p] * 2, *[c_int64] * 3)})
    return kernels
