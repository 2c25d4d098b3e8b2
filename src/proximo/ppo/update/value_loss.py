"""The value loss: an error, its clip around the old values, and the mean over the tokens of an update."""

from torch import Tensor

from proximo.algorithms.losses import ValueStatistics, clipped_value_loss, value_statistics
from proximo.algorithms.masking import select, sum_per_token
from proximo.config.ppo.losses import ValueLossConfig
from proximo.ppo.update.microbatch import Microbatch


def value_loss(values: Tensor, batch: Microbatch, options: ValueLossConfig) -> tuple[Tensor, ValueStatistics]:
    """The value loss of a micro-batch, a scalar, with statistics. Micro-batches add up to the loss. `values`: [T]."""
    old, returns = batch.columns["values"], batch.columns["returns"]
    (clean,) = select(batch.mask, values)
    per_token = clipped_value_loss(clean, old, returns, clip=options.clip, huber_delta=options.error.delta)
    statistics = value_statistics(values, old, returns, batch.mask, clip=options.clip)
    return sum_per_token(per_token, batch.mask, denominator=batch.num_update_tokens), statistics
