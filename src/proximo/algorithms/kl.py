"""Estimators of the KL of the policy from its reference, per token, in nats.

All but `full_kl` are estimates from the tokens that the policy sampled. With d = logprobs - reference_logprobs:

- `k1` = d is unbiased for the KL of the policy from the reference, and can be negative on a token.
- `k2` = d^2 / 2 and `absolute` = |d| are biased, never negative.
- `k3` = exp(-d) - 1 + d is unbiased and never negative.

Use of each (tests/algorithms/test_exact_gradients.py shows every line of this table by enumeration):

- In the reward: `k1` gives the gradient of the KL of the whole sequence. `full_kl` gives the part of it that runs
  through the states visited later; the part at the state itself needs `full_kl` in the loss too, with the same
  coefficient. `k2`, `k3` and `absolute` give the gradient of something else.
- In the loss: `weighted_k3` and `full_kl` give the KL's gradient at each state visited, not that of which states are
  visited. `k2` does so only for tokens that the policy itself sampled: in the first update of a step, where it equals
  `weighted_k3`. `k1` gives none (its expectation is 0), plain `k3` that of the opposite KL, reference from policy.

Source of k1, k2, k3: J. Schulman, "Approximating KL Divergence", 2020.
"""

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut here before exp: e^20 is finite in float32, and so is its square."""


def bounded_exp(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """exp with its argument cut to +-MAX_LOG_RATIO; no gradient beyond."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def k1(logprobs: Float[Tensor, "*shape"], reference_logprobs: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """d per token, the log-ratio itself; shapes equal."""
    return logprobs - reference_logprobs


def k2(logprobs: Float[Tensor, "*shape"], reference_logprobs: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """d^2 / 2 per token."""
    return 0.5 * (logprobs - reference_logprobs).square()


def k3(logprobs: Float[Tensor, "*shape"], reference_logprobs: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """exp(-d) - 1 + d per token."""
    log_ratio = logprobs - reference_logprobs
    return (-log_ratio).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).expm1() + log_ratio


def absolute(logprobs: Float[Tensor, "*shape"], reference_logprobs: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """|d| of each token, where d is the difference of log-probs: an estimate that is biased upwards."""
    return (logprobs - reference_logprobs).abs()


ESTIMATES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute}
"""The estimators by their names in recipes."""


def weighted_k3(
    logprobs: Float[Tensor, "*shape"],
    old_logprobs: Float[Tensor, "*shape"],
    reference_logprobs: Float[Tensor, "*shape"],
) -> Float[Tensor, "*shape"]:
    """(policy / old policy) k3 per token, for the loss; `old_logprobs` are of the policy that sampled the tokens.

    The gradient runs through the weight as well: over samples of the old policy the mean is then the KL of the present
    policy from the reference, and its gradient the KL's, at any distance between old and new (arXiv:2512.02556).
    """
    return bounded_exp(logprobs - old_logprobs) * k3(logprobs, reference_logprobs)


def clamped(per_token: Float[Tensor, "*shape"], limit: float | None) -> Float[Tensor, "*shape"]:
    """The KL of each token cut to +-`limit` nats, without gradient beyond; unchanged if `limit` is None.

    k3 grows with the ratio, so that one token can outweigh all others.
    """
    return per_token if limit is None else per_token.clamp(-limit, limit)


def full_kl(
    logits: Float[Tensor, "*shape vocab"], reference_logits: Float[Tensor, "*shape vocab"]
) -> Float[Tensor, "*shape"]:
    """The KL itself, summed over the vocabulary: [..., V] -> [...], in float32 or wider.

    Logits must be divided by the temperature already. A logit of -inf is a token of probability 0: it adds nothing if
    it is the policy's, and makes the KL infinite if only the reference has it. The value is exact and has no noise, but
    it needs the logits of both models (`models.heads` has the form that never holds them all).
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    logprobs = logits.to(dtype).log_softmax(-1)
    log_ratios = logprobs - reference_logits.to(dtype).log_softmax(-1)
    return (logprobs.exp() * log_ratios.masked_fill(logprobs.isneginf(), 0.0)).sum(-1)
