"""Metrics of the policy and value updates of a PPO step, and of how far the sampler is from the learner.

Means over tokens are over the tokens of the loss, in all minibatches and epochs of the step.
"""

from proximo.metrics.definitions import DOWN, UP, Metric
from proximo.metrics.shared_declarations import balancing_metric
from proximo.metrics.values import Last, Max, Mean, Sum

FIRST_MINIBATCH = (
    Metric("first_minibatch/max_abs_log_ratio", Max, "nats", DOWN),
    Metric("first_minibatch/mean_abs_log_ratio", Mean, "nats", DOWN),
    Metric("first_minibatch/clip_fraction", Mean, "fraction", DOWN),
    Metric("first_minibatch/limit_exceeded", Sum, "steps", DOWN),
)

POLICY = (
    Metric("policy/loss", Mean, "score"),
    Metric("policy/clip_fraction", Mean, "fraction"),
    Metric("policy/ratio_mean", Mean, "ratio"),
    Metric("policy/effective_sample_size", Mean, "fraction", UP),
    Metric("policy/approx_kl", Mean, "nats per token"),
    Metric("policy/entropy", Mean, "nats per token"),
    Metric("policy/gradient_norm", Mean, "norm"),
    Metric("policy/learning_rate", Last, "per update"),
    balancing_metric("policy"),
    Metric("policy/skipped_updates", Sum, "updates", DOWN),
    Metric("policy/stopped_updates", Sum, "updates"),
    Metric("policy/behaviour_weight", Mean, "ratio"),
    Metric("policy/behaviour_clip_fraction", Mean, "fraction", DOWN),
    Metric("policy/behaviour_below_fraction", Mean, "fraction", DOWN),
    Metric("policy/rejected_fraction", Mean, "fraction", DOWN),
    Metric("policy/rejected_below_fraction", Mean, "fraction", DOWN),
)

PAIRS = (
    Metric("pairs/accuracy", Mean, "fraction", UP),
    Metric("pairs/margin", Mean, "score", UP),
    Metric("pairs/reward_chosen", Mean, "score"),
    Metric("pairs/reward_rejected", Mean, "score"),
    Metric("pairs/trained", Sum, "pairs"),
)

PTX = (
    Metric("ptx/loss", Mean, "nats per token", DOWN),
    Metric("ptx/tokens", Sum, "tokens"),
)

VALUE = (
    Metric("value/loss", Mean, "score squared", DOWN),
    Metric("value/clip_fraction", Mean, "fraction"),
    Metric("value/gradient_norm", Mean, "norm"),
    Metric("value/learning_rate", Last, "per update"),
    balancing_metric("value"),
    Metric("value/skipped_updates", Sum, "updates", DOWN),
    Metric("value/scale", Last, "score"),
    Metric("value/shift", Last, "score"),
)


MISMATCH = (
    Metric("mismatch/kl", Mean, "nats per token"),
    Metric("mismatch/k3", Mean, "nats per token", DOWN),
    Metric("mismatch/max_abs_log_ratio", Max, "nats", DOWN),
    Metric("mismatch/unexplained", Last, "nats per token", DOWN),
    Metric("engine/retries", Sum, "requests", DOWN, repeatable=False),
    Metric("engine/stale_responses", Sum, "responses", DOWN, repeatable=False),
    Metric("engine/restarts", Last, "restarts", DOWN, repeatable=False),
    Metric("mismatch/missing_logprobs", Sum, "tokens", DOWN),
)
STALENESS = (
    Metric("staleness/mean_steps", Mean, "steps"),
    Metric("staleness/max_steps", Max, "steps"),
    Metric("staleness/k3", Mean, "nats per token", DOWN),
    Metric("staleness/movement", Last, "nats per token"),
    Metric("staleness/effective_fraction", Last, "fraction", UP),
    Metric("staleness/interrupted_fraction", Mean, "fraction"),
    Metric("staleness/learner_idle_fraction", Mean, "fraction", DOWN, repeatable=False),
    Metric("staleness/engine_idle_fraction", Mean, "fraction", DOWN, repeatable=False),
)
