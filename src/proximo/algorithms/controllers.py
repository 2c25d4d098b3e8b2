"""How the KL coefficient moves from step to step: pure functions of numbers. The caller keeps the coefficient.

Both have one call shape, so that a loop may hold either (the adaptive one with its target and horizon bound).
"""

import math


def constant_kl(coefficient: float, *, observed: float, num_sequences: int) -> float:
    """The coefficient, whatever was observed."""
    del observed, num_sequences
    return coefficient


def adaptive_kl(coefficient: float, *, observed: float, target: float, horizon: float, num_sequences: int) -> float:
    """coefficient * (1 + error * num_sequences / horizon), error = clip(observed / target - 1, -0.2, 0.2).

    Source: arXiv:1909.08593, section 2.2.

    Args:
        coefficient: reward per nat, now.
        observed: nats: the mean over sequences of the sum over tokens of k1, policy from reference. Other measures of
            KL do not fit a target that is meant for this one.
        target: nats, above 0.
        horizon: sequences over which the coefficient may change by its 20 percent.
        num_sequences: how many sequences `observed` is the mean of; with 0 nothing was observed and nothing changes.

    Returns:
        The next coefficient, never below 0.

    Raises:
        ValueError: `observed` is not a number.
    """
    if num_sequences == 0:
        return coefficient
    if math.isnan(observed):
        raise ValueError(
            f"the adaptive KL coefficient needs an observed KL that is a number; got nan over {num_sequences} "
            "sequences: look for log-probs that are not finite"
        )
    error = min(max(observed / target - 1, -0.2), 0.2)
    return max(coefficient * (1 + error * num_sequences / horizon), 0.0)
