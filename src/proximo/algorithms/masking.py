"""The flat layout of tensors, and reductions over the tokens that a boolean mask selects.

Shapes: R responses with `lengths[i]` tokens each, T tokens in all, laid end to end without padding. Values have one
entry more per response, V_0 .. V_n, so they are [T + R], again response by response. A response may be empty.

Nothing outside a mask is read, not even by the backward pass: every function selects with `where` before it
computes, because 0 * nan is nan and so is its gradient. Functions of other modules that work token by token take no
mask; a loss that calls them on tensors with unusable entries passes those tensors through `select` first. The caller
chooses the denominator. Zero or one valid token is a defined case everywhere: means and sums over nothing are 0, so is
their variance.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn import functional

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


def running_sums(x: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
    """[R, N] the sums along each row, up to each column: `cumsum`, with the same bits in every run.

    CUDA adds the parts of a long row in the order in which they are ready, which torch refuses in deterministic mode.
    There it is made of products with triangles of ones.
    """
    if not (x.is_cuda and torch.are_deterministic_algorithms_enabled()):
        return x.cumsum(dim=1)
    return sums_by_products(x)


def sums_by_products(x: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
    """`running_sums` within blocks of 512 columns, plus those of all blocks before."""
    width = 512
    num_rows, num_columns = x.shape
    blocks = functional.pad(x, (0, -num_columns % width)).view(num_rows, -1, width)
    within = blocks @ torch.ones(width, width, dtype=x.dtype, device=x.device).triu()
    before = torch.ones(blocks.shape[1], blocks.shape[1], dtype=x.dtype, device=x.device).triu(1)
    return (within + (within[:, :, -1] @ before)[:, :, None]).flatten(1)[:, :num_columns]


def broadcast_to_tokens(per_response: Shaped[Tensor, "responses"], lengths: Sequence[int]) -> Shaped[Tensor, "tokens"]:
    """[T] from [R]: every token of a response gets its response's number."""
    return per_response[segment_ids(lengths, device=per_response.device)]


def select(mask: Bool[Tensor, "*shape"], *tensors: Shaped[Tensor, "*shape"]) -> tuple[Shaped[Tensor, "*shape"], ...]:
    """Each tensor with 0 where `mask` is False. Losses call it first: no gradient comes from outside the mask."""
    return tuple(torch.where(mask, x, 0) for x in tensors)


def masked_mean(x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Mean of `x` over the mask, a scalar; 0 where the mask is empty. Both tensors have one shape."""
    return torch.where(mask, x, 0).sum() / mask.sum().clamp(min=1)


def masked_variance(
    x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], *, correction: int = 0
) -> Float[Tensor, ""]:
    """Mean squared deviation over the mask, a scalar, dividing by count - `correction`; 0 below two valid tokens.

    `correction` 0 is the biased variance of the batch itself, 1 the unbiased estimate.
    """
    return _deviations(x, mask).square().sum() / (mask.sum() - correction).clamp(min=1)


def standardise(
    x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], *, correction: int = 0, epsilon: float = 1e-8
) -> Float[Tensor, "*shape"]:
    """Mean 0 and variance 1 on the mask, 0 outside: (x - mean) / sqrt(variance + epsilon)."""
    return _deviations(x, mask) * torch.rsqrt(masked_variance(x, mask, correction=correction) + epsilon)


def rescale(
    x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], *, correction: int = 0, epsilon: float = 1e-8
) -> Float[Tensor, "*shape"]:
    """Variance 1 on the mask with the mean kept, 0 outside: for rewards, whose sign carries meaning."""
    scaled = standardise(x, mask, correction=correction, epsilon=epsilon)
    return torch.where(mask, scaled + masked_mean(x, mask), 0)


def sum_per_token(
    per_token: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], *, denominator: Shaped[Tensor, ""] | float
) -> Float[Tensor, ""]:
    """The scalar that a loss is: sum over the mask / `denominator`.

    `denominator` counts the valid tokens of the whole update, over all micro-batches and ranks, so that the gradient
    does not depend on how the update is cut. It must be positive.
    """
    return torch.where(mask, per_token, 0).sum() / denominator


def sum_of_response_means(
    per_token: Float[Tensor, "tokens"],
    mask: Bool[Tensor, "tokens"],
    lengths: Sequence[int],
    *,
    denominator: Shaped[Tensor, ""] | float,
) -> Float[Tensor, ""]:
    """The scalar in which every response weighs the same: sum over responses of the mean over its masked tokens /
    `denominator`, which counts the responses of the whole update. A response without a masked token adds 0.
    """
    counts = segment_sum(mask.to(per_token.dtype), lengths).clamp(min=1)
    return (segment_sum(torch.where(mask, per_token, 0), lengths) / counts).sum() / denominator


def _deviations(x: Tensor, mask: Tensor) -> Tensor:
    """x - mean on the mask, 0 outside."""
    deviations = x - masked_mean(x, mask)
    # Once more: the rounding of a large mean would otherwise be blown up where all entries are equal.
    return torch.where(mask, deviations - masked_mean(deviations, mask), 0)


def _counts(lengths: Sequence[int], device: Device) -> Tensor:
    return torch.tensor(lengths, dtype=torch.long, device=device)
