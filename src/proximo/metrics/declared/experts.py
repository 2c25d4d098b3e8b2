"""The metric of the balance of experts, which every trainer has for each model that it trains."""

from proximo.metrics.definitions import Better, Metric
from proximo.metrics.values import Mean


def balancing_metric(group: str) -> Metric:
    """`group`: the first part of the name."""
    return Metric(
        name=f"{group}/balancing_loss",
        reduction=Mean,
        unit="experts per token",
        definition="Load-balancing loss of a mixture of experts before its coefficient, mean over updates: the number "
        "of experts times the sum over experts of share of tokens times mean probability. It is the number of experts "
        "per token where all get alike, and the number of experts where one gets all. Only for a model that is "
        "balanced.",
        better=Better.DOWN,
    )
