"""What a loss of PPO reads: a few responses with their columns. Not how a minibatch is cut into such."""

from dataclasses import dataclass

from torch import Tensor

from proximo.models.packing import PackedResponses


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """Some whole responses of a minibatch with everything a loss reads; T counts their response tokens."""

    packed: PackedResponses
    mask: Tensor
    """[T]"""
    columns: dict[str, Tensor]
    """Name -> [T], in the order of the packed targets."""
    num_update_tokens: int
    """Valid tokens of the whole minibatch: the denominator of a loss that is a mean over tokens."""
    num_update_responses: int
    """Responses of the whole minibatch, each with a valid token: that of a loss which counts by responses."""
