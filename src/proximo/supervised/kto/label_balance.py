"""The balance of desirable and undesirable answers in the loss."""

ADVISED = (1.0, 4 / 3)
"""The range that arXiv:2402.01306 advises for `label_balance` (section 4.2)."""


def label_balance(
    num_desirable: float, num_undesirable: float, desirable_weight: float, undesirable_weight: float
) -> float:
    """lambda_D n_D / (lambda_U n_U): the weight of all desirable answers, by that of all undesirable ones.

    Infinite without undesirable answers.
    """
    if not num_undesirable:
        return float("inf")
    return desirable_weight * num_desirable / (undesirable_weight * num_undesirable)
