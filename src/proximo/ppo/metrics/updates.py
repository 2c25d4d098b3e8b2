"""Metrics of the policy and value updates of a PPO step.

Means over tokens are over the tokens of the loss, in all minibatches and epochs of the step.
"""

from proximo.metrics.declared.experts import balancing_metric
from proximo.metrics.definitions import Better, Metric
from proximo.metrics.values import Last, Max, Mean, Sum

FIRST_MINIBATCH = (
    Metric(
        name="first_minibatch/max_abs_log_ratio",
        reduction=Max,
        unit="nats",
        definition="Largest |log policy - log old policy| over the tokens of the step's first minibatch, before any "
        "update. Both have the same weights, so the difference is only rounding.",
        better=Better.DOWN,
    ),
    Metric(
        name="first_minibatch/mean_abs_log_ratio",
        reduction=Mean,
        unit="nats",
        definition="Mean of the same difference over those tokens.",
        better=Better.DOWN,
    ),
    Metric(
        name="first_minibatch/clip_fraction",
        reduction=Mean,
        unit="fraction",
        definition="Fraction of those tokens whose loss is clipped, as in policy/clip_fraction.",
        better=Better.DOWN,
    ),
    Metric(
        name="first_minibatch/limit_exceeded",
        reduction=Sum,
        unit="steps",
        definition="1 in a step whose first minibatch exceeded a limit of that check (with a warning), otherwise 0.",
        better=Better.DOWN,
    ),
)

POLICY = (
    Metric(
        name="policy/loss",
        reduction=Mean,
        unit="score",
        definition="Policy loss, mean over the tokens of all updates, or over their responses, depending on "
        "`policy_loss.aggregation`. Its level says little: with standardised advantages it starts near 0, "
        "whatever the score does.",
    ),
    Metric(
        name="policy/clip_fraction",
        reduction=Mean,
        unit="fraction",
        definition="Fraction of tokens, over all updates, whose loss was clipped. With the objectives ppo and gspo: "
        "the ratio (gspo: that of the response) left the clip range on the side where clipping stops the "
        "gradient, or dual_clip bounds the loss. With cispo: the weight was clipped, the gradient stays. With "
        "sapo: none. With m2po: the token was excluded.",
    ),
    Metric(
        name="policy/ratio_mean",
        reduction=Mean,
        unit="ratio",
        definition="Mean over the tokens of all updates of policy / old policy. Equal to 1 except for noise.",
    ),
    Metric(
        name="policy/effective_sample_size",
        reduction=Mean,
        unit="fraction",
        definition="(sum of ratios)^2 / (tokens * sum of squared ratios) over the tokens of all updates: the "
        "effective fraction of the sample for the current policy. 1 if the policy did not change; low if few "
        "tokens dominate the gradient. Fewer epochs or a lower learning rate raise it.",
        better=Better.UP,
    ),
    Metric(
        name="policy/approx_kl",
        reduction=Mean,
        unit="nats per token",
        definition="Mean over the tokens of all updates of (ratio - 1) - log ratio: how far the updates of this step "
        "moved the policy from the sampling policy.",
    ),
    Metric(
        name="policy/entropy",
        reduction=Mean,
        unit="nats per token",
        definition="Mean over tokens of the negative log-prob of the sampled token at the sampling temperature. It "
        "estimates the mean entropy of the next-token distributions without extra cost, and is unbiased if only "
        "the temperature shaped them.",
    ),
    Metric(
        name="policy/gradient_norm",
        reduction=Mean,
        unit="norm",
        definition="L2 norm of the policy's gradient before clipping, mean over updates; on a shared trunk, of the "
        "gradient of both losses.",
    ),
    Metric(
        name="policy/learning_rate",
        reduction=Last,
        unit="per update",
        definition="Learning rate of the policy's last update.",
    ),
    balancing_metric("policy"),
    Metric(
        name="policy/skipped_updates",
        reduction=Sum,
        unit="updates",
        definition="Policy updates that a guard skipped: ratio or KL above its limit, or a gradient that is not "
        "finite.",
        better=Better.DOWN,
    ),
    Metric(
        name="policy/stopped_updates",
        reduction=Sum,
        unit="updates",
        definition="Policy updates that did not happen because `guards.target_kl` ended the step, including the one "
        "that triggered it. Only with `target_kl`.",
    ),
    Metric(
        name="policy/behaviour_weight",
        reduction=Mean,
        unit="ratio",
        definition="Mean over the tokens of the step of policy / sampler before the first update, not capped. Equal "
        "to 1 except for noise. Only with `policy_loss.behaviour_weight`.",
    ),
    Metric(
        name="policy/behaviour_clip_fraction",
        reduction=Mean,
        unit="fraction",
        definition="Fraction of those tokens whose weight is above `policy_loss.behaviour_cap` or below "
        "`policy_loss.behaviour_floor`.",
        better=Better.DOWN,
    ),
    Metric(
        name="policy/behaviour_below_fraction",
        reduction=Mean,
        unit="fraction",
        definition="Fraction of those tokens whose weight is below `policy_loss.behaviour_floor`. Only with a floor.",
        better=Better.DOWN,
    ),
    Metric(
        name="policy/rejected_fraction",
        reduction=Mean,
        unit="fraction",
        definition="Fraction of the counted tokens that `policy_loss.rejection` rejects, alone or with their response.",
        better=Better.DOWN,
    ),
    Metric(
        name="policy/rejected_below_fraction",
        reduction=Mean,
        unit="fraction",
        definition="Fraction of those tokens that are rejected for a ratio below `policy_loss.rejection.lower`. Only "
        "with such a bound.",
        better=Better.DOWN,
    ),
)

PAIRS = (
    Metric(
        name="pairs/accuracy",
        reduction=Mean,
        unit="fraction",
        definition="Fraction of the pairs of all updates whose better response has the higher implicit reward; a tie "
        "counts half. Only with the objectives `online_dpo` and `online_ipo`, as the others of this group.",
        better=Better.UP,
    ),
    Metric(
        name="pairs/margin",
        reduction=Mean,
        unit="score",
        definition="Mean over the same pairs of the better response's implicit reward minus the worse one's.",
        better=Better.UP,
    ),
    Metric(
        name="pairs/reward_chosen",
        reduction=Mean,
        unit="score",
        definition="Mean implicit reward of the better responses: `kl.coefficient` times policy log-prob minus "
        "reference log-prob.",
    ),
    Metric(
        name="pairs/reward_rejected",
        reduction=Mean,
        unit="score",
        definition="Mean implicit reward of the worse responses.",
    ),
    Metric(
        name="pairs/trained",
        reduction=Sum,
        unit="pairs",
        definition="Pairs in the updates of the step, over all epochs. Prompts whose responses have equal scores give "
        "none: group/zero_advantage_fraction is their share.",
    ),
)

PTX = (
    Metric(
        name="ptx/loss",
        reduction=Mean,
        unit="nats per token",
        definition="Negative log-likelihood of the texts in the policy's updates, mean over their counted tokens, "
        "without its coefficient. Only with `ppo.ptx`. policy/loss does not include it; policy/gradient_norm "
        "does.",
        better=Better.DOWN,
    ),
    Metric(
        name="ptx/tokens",
        reduction=Sum,
        unit="tokens",
        definition="Number of tokens in the mean of ptx/loss.",
    ),
)

VALUE = (
    Metric(
        name="value/loss",
        reduction=Mean,
        unit="score squared",
        definition="Value loss (half the squared error, or as set by `value_loss.kind`; clipped if enabled), mean "
        "over the tokens of all updates; with normalised values, in squared standard deviations of the returns.",
        better=Better.DOWN,
    ),
    Metric(
        name="value/clip_fraction",
        reduction=Mean,
        unit="fraction",
        definition="Fraction of tokens, over all updates, whose clipped error was the larger one.",
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
    balancing_metric("value"),
    Metric(
        name="value/skipped_updates",
        reduction=Sum,
        unit="updates",
        definition="Value updates that a guard skipped.",
        better=Better.DOWN,
    ),
    Metric(
        name="value/scale",
        reduction=Last,
        unit="score",
        definition="The value of one unit of the value model's output: the running standard deviation of the "
        "returns, at least 0.1. Only with normalised values.",
    ),
    Metric(
        name="value/shift",
        reduction=Last,
        unit="score",
        definition="The value at an output of 0 of the value model. Only with normalised values.",
    ),
)
