"""Products of a few rows with a large matrix, shared out among the threads of a CPU. Not which passes have few rows.

A product x W' of a few rows gains little from a second thread, or nothing. Cut by the outputs of W into slices that a
batched product takes at once, it does: on two threads 2 to 24 rows take 0.3 to 0.9 of the time.

Legend: B rows, I inputs, O outputs, S slices.
"""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

SLICES = 4
LARGEST = 64
"""Rows up to which a single product gains."""
SMALLEST_WEIGHTS = 2**18
"""Elements of W from which a single product does, although its parts have to be laid side by side again."""


def sliced(weight: Tensor) -> Tensor | None:
    """[O, I] -> [S, I, O / S], a view of W' by outputs; None where there is none."""
    num_outputs, num_inputs = weight.shape
    if num_outputs % SLICES or not weight.is_contiguous():
        return None
    return weight.view(SLICES, num_outputs // SLICES, num_inputs).transpose(1, 2)


def sliced_by_inputs(weight: Tensor) -> Tensor | None:
    """[O, I] -> [S, I / S, O], a view of W' by inputs, whose products add up; None where there is none."""
    num_outputs, num_inputs = weight.shape
    if num_inputs % SLICES or not weight.is_contiguous():
        return None
    return weight.view(num_outputs, SLICES, num_inputs // SLICES).permute(1, 2, 0)


def has_threads(like: Tensor) -> bool:
    """True where there is something to share out: a CPU with several threads."""
    # A rehearsal does not know the threads of the run: it takes what holds more.
    return like.device.type == "cpu" and (torch.get_num_threads() > 1 or isinstance(like, FakeTensor))


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """rows [..., I], weight [O, I], bias [O] -> x W' + b [..., O]; in slices where that is faster and takes no
    gradient."""
    slices = sliced(weight) if _gains(rows, weight) else None
    if slices is None:
        return functional.linear(rows, weight, bias)
    parts = torch.bmm(rows.expand(len(slices), *rows.shape), slices)
    found = parts.transpose(0, 1).reshape(len(rows), len(weight))
    return found if bias is None else found.add_(bias)


def _gains(rows: Tensor, weight: Tensor) -> bool:
    fits = rows.dim() == 2 and 1 < len(rows) <= LARGEST and weight.numel() >= SMALLEST_WEIGHTS
    return fits and has_threads(rows) and not torch.is_grad_enabled()
