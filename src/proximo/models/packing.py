"""Packed sequences: laid end to end without padding, with the positions of each response.

T counts the tokens of a batch, S its sequences, N the response tokens among T.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Packed:
    """S sequences, concatenated to one row of T tokens."""

    token_ids: Int64[Tensor, "tokens"]
    position_ids: Int64[Tensor, "tokens"]
    """0, 1, 2, ... within each sequence."""
    lengths: tuple[int, ...]
    """[S] tokens of each sequence, each at least 1; their sum is T."""

    @property
    def num_tokens(self) -> int:
        """Number of packed tokens, T."""
        return self.token_ids.shape[0]

    @property
    def cu_seqlens(self) -> Tensor:
        """[S + 1] int32: the index at which each sequence begins, and T."""
        return cumulative_lengths(self.lengths, self.token_ids.device)

    @property
    def last_indices(self) -> Tensor:
        """[S] int64: the flat index of each sequence's last token."""
        ends = torch.tensor(list(accumulate(self.lengths)), dtype=torch.long)
        return send(ends - 1, self.token_ids.device)

    def to(self, device: torch.device | str) -> "Packed":
        """The same batch on another device."""
        return replace(self, token_ids=send(self.token_ids, device), position_ids=send(self.position_ids, device))


@dataclass(frozen=True, kw_only=True)
class PackedResponses:
    """Prompts with their responses, packed, and the hidden states that predict and value each response token.

    The hidden state before response token t predicts it and carries V_t; the one after the last token carries V_T.
    """

    packed: Packed
    predictors: Int64[Tensor, "responded"]
    """Flat index of the hidden state before each response token."""
    targets: Int64[Tensor, "responded"]
    """The response tokens, in the order of `predictors`."""
    value_positions: Int64[Tensor, "states"]
    """For each response, its predictors and then its last token."""
    response_lengths: tuple[int, ...]
    """[S] tokens of each response; 0 is allowed and leaves a response with its V_T alone."""

    def to(self, device: torch.device | str) -> "PackedResponses":
        """The same batch on another device."""
        return replace(
            self,
            packed=self.packed.to(device),
            predictors=send(self.predictors, device),
            targets=send(self.targets, device),
            value_positions=send(self.value_positions, device),
        )


def cumulative_lengths(lengths: Sequence[int], device: torch.device | str) -> Tensor:
    """[S + 1] int32: 0 and the cumulative sums of `lengths`, as varlen kernels expect them."""
    return send(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device)


def pack(sequences: Sequence[Sequence[int]], *, device: torch.device | str = "cpu") -> Packed:
    """Pack token ids. Raises ValueError if there is no sequence or one is empty."""
    lengths = tuple(len(sequence) for sequence in sequences)
    if not lengths or min(lengths) == 0:
        raise ValueError(f"packing wants at least one sequence, each of at least one token; the lengths are {lengths}")
    return _packed(_flat(sequences, sum(lengths)), lengths, device)


def pack_responses(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], *, device: torch.device | str = "cpu"
) -> PackedResponses:
    """Pack each prompt with its response. Raises ValueError for an empty prompt."""
    pairs = list(zip(prompts, responses, strict=True))
    if any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("every prompt needs at least one token, because a hidden state must predict the first one")
    if not pairs:
        raise ValueError("packing wants at least one sequence, each of at least one token; the lengths are ()")
    lengths = tuple(len(prompt) + len(response) for prompt, response in pairs)
    tokens = _flat([part for pair in pairs for part in pair], sum(lengths))
    answers = np.array([len(response) for response in responses], dtype=np.int64)
    before = np.cumsum(lengths) - answers - 1  # index of the hidden state that predicts each first response token
    predictors = _runs(before, answers)
    return PackedResponses(
        packed=_packed(tokens, lengths, device),
        predictors=send(torch.from_numpy(predictors), device),
        targets=send(torch.from_numpy(tokens[predictors + 1]), device),
        value_positions=send(torch.from_numpy(_runs(before, answers + 1)), device),
        response_lengths=tuple(len(response) for response in responses),
    )


def pack_nothing(device: torch.device | str) -> PackedResponses:
    """One token and no response: the pass of a rank without a batch, beside the others' passes."""
    one = pack_responses([[0]], [[]], device=device)
    return replace(one, response_lengths=(), value_positions=one.predictors)


def send(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to a device. Copies from the host to CUDA are asynchronous, from pinned memory."""
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu" and torch.cuda.is_available():
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


Indices = np.ndarray[Any, np.dtype[np.int64]]


def _flat(sequences: Sequence[Sequence[int]], num_tokens: int) -> Indices:
    return np.fromiter(chain.from_iterable(sequences), dtype=np.int64, count=num_tokens)


def _runs(first: Indices, counts: Indices) -> Indices:
    """Concatenated ranges: for each i, the `counts[i]` numbers from `first[i]` on."""
    begins = np.cumsum(counts) - counts
    return np.arange(counts.sum()) + np.repeat(first - begins, counts)


def _packed(tokens: Indices, lengths: tuple[int, ...], device: torch.device | str) -> Packed:
    counts = np.array(lengths, dtype=np.int64)
    positions = _runs(np.zeros_like(counts), counts)
    return Packed(
        token_ids=send(torch.from_numpy(tokens), device),
        position_ids=send(torch.from_numpy(positions), device),
        lengths=lengths,
    )
