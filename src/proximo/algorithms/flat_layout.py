"""Index arithmetic of the flat layout: which token, value or sum belongs to which response.

Shapes: R responses with `lengths[i]` tokens each, T tokens in all, laid end to end without padding. Values have one
entry more per response, V_0 .. V_n, so they are [T + R], again response by response. A response may be empty.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

Device = torch.device | str | None


def segment_ids(lengths: Sequence[int], *, device: Device = None) -> Int[Tensor, "tokens"]:
    """[T] long: the response that each token belongs to."""
    counts = _counts(lengths, device)
    return torch.repeat_interleave(torch.arange(len(counts), device=device), counts, output_size=sum(lengths))


def token_positions(lengths: Sequence[int], *, device: Device = None) -> Int[Tensor, "tokens"]:
    """[T] long: 0, 1, 2, ... within each response."""
    counts = _counts(lengths, device)
    starts = counts.cumsum(0) - counts
    num_tokens = sum(lengths)  # given, or the host would wait for an accelerator to compute it
    places = torch.arange(num_tokens, device=device)
    return places - torch.repeat_interleave(starts, counts, output_size=num_tokens)


def last_indices(lengths: Sequence[int], *, device: Device = None) -> Int[Tensor, "responses"]:
    """[R] long: the index of each response's last token among the T.

    Raises:
        ValueError: a response is empty, and so has no last token.
    """
    if 0 in lengths:
        raise ValueError(
            f"every response must have a token to have a last one; response {list(lengths).index(0)} of "
            f"{len(lengths)} is empty: leave it out first"
        )
    return _counts(lengths, device).cumsum(0) - 1


def value_positions(lengths: Sequence[int], *, device: Device = None) -> Int[Tensor, "tokens"]:
    """[T] long: the index of V_t, the value of the state before each token, in the T + R values."""
    return torch.arange(sum(lengths), device=device) + segment_ids(lengths, device=device)


def final_value_positions(lengths: Sequence[int], *, device: Device = None) -> Int[Tensor, "responses"]:
    """[R] long: the index of V_n, the value of the state after each response's last token, in the T + R values."""
    return (_counts(lengths, device) + 1).cumsum(0) - 1


def segment_rows(x: Shaped[Tensor, "tokens"], lengths: Sequence[int]) -> Shaped[Tensor, "responses longest"]:
    """[R, longest] from [T]: each response on its own row, zeros after its end. For loops over time."""
    rows = x.new_zeros(len(lengths), max(lengths, default=0))
    index = segment_ids(lengths, device=x.device), token_positions(lengths, device=x.device)
    return rows.index_put(index, x)


def segment_sum(x: Shaped[Tensor, "tokens"], lengths: Sequence[int]) -> Shaped[Tensor, "responses"]:
    """[R] from [T]: the sum over each response; 0 for an empty one. Repeatable to the bit on every device."""
    return segment_rows(x, lengths).sum(1)


def _counts(lengths: Sequence[int], device: Device) -> Tensor:
    return torch.tensor(lengths, dtype=torch.long, device=device)
