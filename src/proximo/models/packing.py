"""Sequences laid end to end without padding, and where in them each response stands. Not the attention over them.

T counts the tokens of a batch, S its sequences, N the response tokens among T.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Packed:
    """S sequences, one after the other, as one row."""

    token_ids: Tensor
    """[T] int64."""
    position_ids: Tensor
    """[T] int64: 0, 1, 2, ... within each sequence."""
    lengths: tuple[int, ...]
    """[S] tokens of each sequence, each at least 1; their sum is T."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.token_ids.shape[0]

    @property
    def cu_seqlens(self) -> Tensor:
        """[S + 1] int32: where each sequence begins, and T."""
        return cumulative_lengths(self.lengths, self.token_ids.device)

    @property
    def last_indices(self) -> Tensor:
        """[S] int64: the flat index of each sequence's last token."""
        ends = torch.tensor(list(accumulate(self.lengths)), dtype=torch.long)
        return (ends - 1).to(self.token_ids.device)

    def to(self, device: torch.device | str) -> "Packed":
        """The same batch on another device."""
        return replace(self, token_ids=self.token_ids.to(device), position_ids=self.position_ids.to(device))


@dataclass(frozen=True, kw_only=True)
class PackedResponses:
    """Prompts with their responses, packed, and the hidden states that predict and value each response token.

    The hidden state before response token t predicts it and carries V_t; the one after the last token carries V_T.
    """

    packed: Packed
    predictors: Tensor
    """[N] int64: flat index of the hidden state before each response token."""
    targets: Tensor
    """[N] int64: the response tokens."""
    value_positions: Tensor
    """[N + S] int64: for each response, its predictors and then its last token."""
    response_lengths: tuple[int, ...]
    """[S] tokens of each response; 0 is allowed and leaves a response with its V_T alone."""

    def to(self, device: torch.device | str) -> "PackedResponses":
        """The same batch on another device."""
        return replace(
            self,
            packed=self.packed.to(device),
            predictors=self.predictors.to(device),
            targets=self.targets.to(device),
            value_positions=self.value_positions.to(device),
        )


def cumulative_lengths(lengths: Sequence[int], device: torch.device | str) -> Tensor:
    """[S + 1] int32: 0 and the running sums of `lengths`, as varlen kernels want them."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def pack(sequences: Sequence[Sequence[int]], *, device: torch.device | str = "cpu") -> Packed:
    """Lay token ids end to end. Raises ValueError for no sequence at all, or an empty one."""
    lengths = tuple(len(sequence) for sequence in sequences)
    if not lengths or min(lengths) == 0:
        raise ValueError(f"packing wants at least one sequence, each of at least one token; the lengths are {lengths}")
    tokens = [token for sequence in sequences for token in sequence]
    positions = [position for length in lengths for position in range(length)]
    return Packed(
        token_ids=torch.tensor(tokens, dtype=torch.long, device=device),
        position_ids=torch.tensor(positions, dtype=torch.long, device=device),
        lengths=lengths,
    )


def pack_responses(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], *, device: torch.device | str = "cpu"
) -> PackedResponses:
    """Pack each prompt with its response. Raises ValueError for a prompt without tokens: nothing would predict."""
    pairs = list(zip(prompts, responses, strict=True))
    if any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("every prompt needs at least one token, because a hidden state must predict the first one")
    packed = pack([[*prompt, *response] for prompt, response in pairs], device=device)
    predictors: list[int] = []
    value_positions: list[int] = []
    start = 0
    for prompt, response in pairs:
        first = start + len(prompt) - 1
        predictors.extend(range(first, first + len(response)))
        value_positions.extend(range(first, first + len(response) + 1))
        start += len(prompt) + len(response)
    return PackedResponses(
        packed=packed,
        predictors=torch.tensor(predictors, dtype=torch.long, device=device),
        targets=torch.tensor([t for response in responses for t in response], dtype=torch.long, device=device),
        value_positions=torch.tensor(value_positions, dtype=torch.long, device=device),
        response_lengths=tuple(len(response) for response in responses),
    )
