"""Whether an update is one forward and backward pass, whatever the data: an optimizer in the backward wants that."""

from proximo.config.run import OptimizerConfig


def check_one_pass(optimizer: OptimizerConfig | None, *, longest: int, budget: int, section: str, rows: str) -> None:
    """Raises ValueError where weights step in the backward pass, and an update may be cut into micro-batches.

    longest: tokens of the longest update that the data may hold; budget: tokens of a micro-batch; rows: the key with
    the number of rows of an update.
    """
    if optimizer is None or not optimizer.in_backward or longest <= budget:
        return
    raise ValueError(
        "in_backward steps each weight in the backward pass, so an update must be one micro-batch, and the longest one "
        f"may have {longest:,} tokens: set {section}.tokens_per_microbatch (now {budget:,}) to that, lower {rows}, or "
        "set in_backward: false"
    )
