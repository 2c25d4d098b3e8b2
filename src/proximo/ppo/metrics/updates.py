"""The metrics of the updates of a PPO step, policy and value. Not those of the experience that they learn from.

Means over tokens are over the tokens that the loss counted, in all minibatches and epochs of the step.
"""

from proximo.metrics.definitions import Better, Metric
from proximo.metrics.values import Last, Max, Mean, Sum

FIRST_MINIBATCH = (
    Metric(
        name="first_minibatch/max_abs_log_ratio",
        reduction=Max,
        unit="nats",
        definition="Largest |log policy - log old policy| over the tokens of the step's first minibatch, before any "
        "update: the two are the same weights, so this is rounding and nothing else.",
        better=Better.DOWN,
    ),
    Metric(
        name="first_minibatch/mean_abs_log_ratio",
        reduction=Mean,
        unit="nats",
        definition="Mean of the same over those tokens.",
        better=Better.DOWN,
    ),
    Metric(
        name="first_minibatch/clip_fraction",
        reduction=Mean,
        unit="fraction",
        definition="Share of those tokens on whose loss the clip acts already, as in policy/clip_fraction.",
        better=Better.DOWN,
    ),
    Metric(
        name="first_minibatch/limit_exceeded",
        reduction=Sum,
        unit="steps",
        definition="1 in a step whose first minibatch was beyond a limit of that check (a warning was given), else 0.",
        better=Better.DOWN,
    ),
)

POLICY = (
    Metric(
        name="policy/loss",
        reduction=Mean,
        unit="score",
        definition="Policy loss, mean over the tokens of all updates, or over their responses where "
        "`policy_loss.aggregation` counts those. Its level says little: it starts near 0 with standardised advantages, "
        "whatever the score does.",
    ),
    Metric(
        name="policy/clip_fraction",
        reduction=Mean,
        unit="fraction",
        definition="Share of tokens, over all updates, on whose loss the clip acted. With the objectives ppo and gspo: "
        "the ratio (gspo: that of the response) left the clip range on the side where clipping stops the gradient, or "
        "dual_clip bounds the loss. With cispo: the weight was cut, the gradient stays. With sapo: none. "
        "With m2po: the token was left out.",
    ),
    Metric(
        name="policy/ratio_mean",
        reduction=Mean,
        unit="ratio",
        definition="Mean over the tokens of all updates of policy / old policy. 1 up to noise.",
    ),
    Metric(
        name="policy/effective_sample_size",
        reduction=Mean,
        unit="fraction",
        definition="(sum of ratios)^2 / (tokens * sum of squared ratios) over the tokens of all updates: the share of "
        "the tokens that the sample is worth for the policy as it is now. 1 where nothing moved; low where few tokens "
        "carry the gradient, which fewer epochs or a lower rate mends.",
        better=Better.UP,
    ),
    Metric(
        name="policy/approx_kl",
        reduction=Mean,
        unit="nats per token",
        definition="Mean over the tokens of all updates of (ratio - 1) - log ratio: how far the updates of this step "
        "moved the policy from the one that sampled.",
    ),
    Metric(
        name="policy/entropy",
        reduction=Mean,
        unit="nats per token",
        definition="Mean over tokens of minus the log-prob of the token that was drawn, at the sampling temperature: "
        "an estimate of the mean entropy of the next-token distributions, unbiased where only the temperature shaped "
        "them, at no cost.",
    ),
    Metric(
        name="policy/gradient_norm",
        reduction=Mean,
        unit="norm",
        definition="L2 norm of the policy's gradient before clipping, mean over updates; on a shared trunk that "
        "of the gradient of both losses.",
    ),
    Metric(
        name="policy/learning_rate",
        reduction=Last,
        unit="per update",
        definition="Learning rate of the policy's last update.",
    ),
    Metric(
        name="policy/skipped_updates",
        reduction=Sum,
        unit="updates",
        definition="Policy updates left out by a guard: ratio or KL beyond its limit, or a gradient that is not "
        "finite.",
        better=Better.DOWN,
    ),
    Metric(
        name="policy/stopped_updates",
        reduction=Sum,
        unit="updates",
        definition="Policy updates that the step did not come to because `guards.target_kl` ended it, the one before "
        "which it did included. Only with `target_kl`.",
    ),
    Metric(
        name="policy/behaviour_weight",
        reduction=Mean,
        unit="ratio",
        definition="Mean over the tokens of the step of policy / sampler before the first update, not capped. 1 up to "
        "noise. Only with `policy_loss.behaviour_weight`.",
    ),
    Metric(
        name="policy/behaviour_clip_fraction",
        reduction=Mean,
        unit="fraction",
        definition="Share of those tokens whose weight is above `policy_loss.behaviour_cap` or below "
        "`policy_loss.behaviour_floor`.",
        better=Better.DOWN,
    ),
    Metric(
        name="policy/rejected_fraction",
        reduction=Mean,
        unit="fraction",
        definition="Share of the tokens that count which `policy_loss.rejection` leaves out of the policy's updates, "
        "alone or with their response.",
        better=Better.DOWN,
    ),
)

PTX = (
    Metric(
        name="ptx/loss",
        reduction=Mean,
        unit="nats per token",
        definition="Negative log-likelihood of the texts that joined the policy's updates, mean over their counted "
        "tokens, without its coefficient. Only with `ppo.ptx`; policy/loss does not contain it, policy/gradient_norm "
        "does.",
        better=Better.DOWN,
    ),
    Metric(
        name="ptx/tokens",
        reduction=Sum,
        unit="tokens",
        definition="Tokens that ptx/loss is the mean over.",
    ),
)

VALUE = (
    Metric(
        name="value/loss",
        reduction=Mean,
        unit="score squared",
        definition="Value loss (half the squared error, or as `value_loss.kind` says; clipped where that is on), mean "
        "over the tokens of all updates; in squared standard deviations of the returns where values are normalised.",
        better=Better.DOWN,
    ),
    Metric(
        name="value/clip_fraction",
        reduction=Mean,
        unit="fraction",
        definition="Share of tokens, over all updates, where the clipped error was the larger one.",
    ),
    Metric(
        name="value/gradient_norm",
        reduction=Mean,
        unit="norm",
        definition="L2 norm of the value model's gradient before clipping, mean over updates.",
    ),
    Metric(
        name="value/learning_rate",
        reduction=Last,
        unit="per update",
        definition="Learning rate of the value model's last update.",
    ),
    Metric(
        name="value/skipped_updates",
        reduction=Sum,
        unit="updates",
        definition="Value updates left out by a guard.",
        better=Better.DOWN,
    ),
    Metric(
        name="value/scale",
        reduction=Last,
        unit="score",
        definition="What an output of 1 of the value model is worth: the running standard deviation of the returns, at "
        "least 0.1. Only where values are normalised.",
    ),
    Metric(
        name="value/shift",
        reduction=Last,
        unit="score",
        definition="The value where the value model's output is 0. Only where values are normalised.",
    ),
)
