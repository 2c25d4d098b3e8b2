"""The draw of `sample.c` for tensors."""

import ctypes
from ctypes import c_float, c_int64, c_void_p

import torch
from torch import Tensor

from proximo.native.library import pointer


def sample(
    kernels: ctypes.CDLL, logits: Tensor, *, streams: Tensor, positions: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """logits [B, V], streams and positions [B] int64 -> tokens [B] int64 and their log-probs [B] under the full softmax
    at the temperature; NaN where logits are not finite."""
    tokens, logprobs = torch.empty_like(streams), logits.new_empty(len(logits))
    inputs = (c_void_p(pointer(each)) for each in (logits, streams, positions))
    results = (c_void_p(pointer(each)) for each in (tokens, logprobs))
    sizes = map(c_int64, (*logits.shape, torch.get_num_threads()))
    kernels.sample(*inputs, c_float(temperature), *results, *sizes)
    return tokens, logprobs
