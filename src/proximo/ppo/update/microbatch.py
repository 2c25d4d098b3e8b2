"""The micro-batch record that PPO's losses take."""

from dataclasses import dataclass

from torch import Tensor

from proximo.models.packing import Packed, PackedResponses


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """Whole responses of a minibatch with all inputs of a loss. T is the number of their response tokens."""

    packed: PackedResponses
    mask: Tensor
    """[T] bool: tokens that count in the loss."""
    columns: dict[str, Tensor]
    """Name -> [T] inputs of the loss, in the order of the packed targets."""
    num_update_tokens: int
    """Number of masked-in tokens in the whole minibatch: the denominator of a mean over tokens."""
    num_update_responses: int
    """Number of responses in the whole minibatch: the denominator of a mean over responses."""

    @property
    def tokens(self) -> Packed:
        """All tokens of the micro-batch."""
        return self.packed.packed
