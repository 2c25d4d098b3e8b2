"""Metrics of the policy and value updates of a PPO step, and of how far the sampler is from the learner.

Means over tokens are over the tokens of the loss, in all minibatches and epochs of the step.
"""

from proximo.metrics.definitions import DOWN, UP, Metric
from proximo.metrics.shared_declarations import balancing_metric
from proximo.metrics.values import Last, Max, Mean, Sum

FIRST_MINIBATCH = (
    Metric("first_minibatch/max_abs_log_ratio", Max, "nats", DOWN).means(
        "Largest |log policy - log old policy| over the tokens of the step's first minibatch, before any update. Both "
        "have the same weights, so the difference is only rounding."
    ),
    Metric("first_minibatch/mean_abs_log_ratio", Mean, "nats", DOWN).means(
        "Mean of the same difference over those tokens."
    ),
    Metric("first_minibatch/clip_fraction", Mean, "fraction", DOWN).means(
        "Fraction of those tokens whose loss is clipped, as in policy/clip_fraction."
    ),
    Metric("first_minibatch/limit_exceeded", Sum, "steps", DOWN).means(
        "1 in a step whose first minibatch exceeded a limit of that check (with a warning), otherwise 0."
    ),
)

POLICY = (
    Metric("policy/loss", Mean, "score").means(
        "Policy loss, mean over the tokens of all updates, or over their responses, depending on "
        "`policy_loss.aggregation`. Its level says little: with standardised advantages it starts near 0, whatever the "
        "score does."
    ),
    Metric("policy/clip_fraction", Mean, "fraction").means(
        "Fraction of tokens, over all updates, whose loss was clipped. With the objectives ppo and gspo: the ratio "
        "(gspo: that of the response) left the clip range on the side where clipping stops the gradient, or dual_clip "
        "bounds the loss. With gmpo: the same, token by token. With cispo: the weight was clipped, the gradient "
        "stays. With sapo: none. With m2po: the token was excluded."
    ),
    Metric("policy/ratio_mean", Mean, "ratio").means(
        "Mean over the tokens of all updates of policy / old policy. Equal to 1 except for noise."
    ),
    Metric("policy/effective_sample_size", Mean, "fraction", UP).means(
        "(sum of ratios)^2 / (tokens * sum of squared ratios) over the tokens of all updates: the effective fraction "
        "of the sample for the current policy. 1 if the policy did not change; low if few tokens dominate the "
        "gradient. Fewer epochs or a lower learning rate raise it."
    ),
    Metric("policy/approx_kl", Mean, "nats per token").means(
        "Mean over the tokens of all updates of (ratio - 1) - log ratio: how far the updates of this step moved the "
        "policy from the sampling policy."
    ),
    Metric("policy/entropy", Mean, "nats per token").means(
        "Mean over tokens of the negative log-prob of the sampled token at the sampling temperature. It estimates the "
        "mean entropy of the next-token distributions without extra cost, and is unbiased if only the temperature "
        "shaped them."
    ),
    Metric("policy/gradient_norm", Mean, "norm").means(
        "L2 norm of the policy's gradient before clipping, mean over updates; on a shared trunk, of the gradient of "
        "both losses."
    ),
    Metric("policy/learning_rate", Last, "per update").means("Learning rate of the policy's last update."),
    balancing_metric("policy"),
    Metric("policy/skipped_updates", Sum, "updates", DOWN).means(
        "Policy updates that a guard skipped: ratio or KL above its limit, or a gradient that is not finite."
    ),
    Metric("policy/stopped_updates", Sum, "updates").means(
        "Policy updates that did not happen because `guards.target_kl` ended the step, including the one that "
        "triggered it. Only with `target_kl`."
    ),
    Metric("policy/behaviour_weight", Mean, "ratio").means(
        "Mean over the tokens of the step of policy / sampler before the first update, not capped. Equal to 1 except "
        "for noise. Only with `policy_loss.behaviour_weight`."
    ),
    Metric("policy/behaviour_clip_fraction", Mean, "fraction", DOWN).means(
        "Fraction of those tokens whose weight is above `policy_loss.behaviour_weight.cap` or below "
        "`policy_loss.behaviour_weight.floor`."
    ),
    Metric("policy/behaviour_below_fraction", Mean, "fraction", DOWN).means(
        "Fraction of those tokens whose weight is below `policy_loss.behaviour_weight.floor`. Only with a floor."
    ),
    Metric("policy/rejected_fraction", Mean, "fraction", DOWN).means(
        "Fraction of the counted tokens that `policy_loss.rejection` rejects, alone or with their response."
    ),
    Metric("policy/rejected_below_fraction", Mean, "fraction", DOWN).means(
        "Fraction of those tokens that are rejected for a ratio below `policy_loss.rejection.lower`. Only with such a "
        "bound."
    ),
)

PAIRS = (
    Metric("pairs/accuracy", Mean, "fraction", UP).means(
        "Fraction of the pairs of all updates whose better response has the higher implicit reward; a tie counts half. "
        "Only with the objectives `online_dpo` and `online_ipo`, as the others of this group."
    ),
    Metric("pairs/margin", Mean, "score", UP).means(
        "Mean over the same pairs of the better response's implicit reward minus the worse one's."
    ),
    Metric("pairs/reward_chosen", Mean, "score").means(
        "Mean implicit reward of the better responses: `kl.coefficient` times policy log-prob minus reference log-prob."
    ),
    Metric("pairs/reward_rejected", Mean, "score").means("Mean implicit reward of the worse responses."),
    Metric("pairs/trained", Sum, "pairs").means(
        "Pairs in the updates of the step, over all epochs. Prompts whose responses have equal scores give none: "
        "group/zero_advantage_fraction is their share."
    ),
)

PTX = (
    Metric("ptx/loss", Mean, "nats per token", DOWN).means(
        "Negative log-likelihood of the texts in the policy's updates, mean over their counted tokens, without its "
        "coefficient. Only with `ppo.ptx`. policy/loss does not include it; policy/gradient_norm does."
    ),
    Metric("ptx/tokens", Sum, "tokens").means("Number of tokens in the mean of ptx/loss."),
)

VALUE = (
    Metric("value/loss", Mean, "score squared", DOWN).means(
        "Value loss (half the squared error, or as set by `value_loss.error`; clipped if enabled), mean over the "
        "tokens of all updates; with normalised values, in squared standard deviations of the returns."
    ),
    Metric("value/clip_fraction", Mean, "fraction").means(
        "Fraction of tokens, over all updates, whose clipped error was the larger one."
    ),
    Metric("value/gradient_norm", Mean, "norm").means(
        "L2 norm of the value model's gradient before clipping, mean over updates."
    ),
    Metric("value/learning_rate", Last, "per update").means("Learning rate of the value model's last update."),
    balancing_metric("value"),
    Metric("value/skipped_updates", Sum, "updates", DOWN).means("Value updates that a guard skipped."),
    Metric("value/scale", Last, "score").means(
        "The value of one unit of the value model's output: the running standard deviation of the returns, at least "
        "0.1. Only with normalised values."
    ),
    Metric("value/shift", Last, "score").means(
        "The value at an output of 0 of the value model. Only with normalised values."
    ),
)


MISMATCH = (
    Metric("mismatch/kl", Mean, "nats per token").means(
        "Mean over tokens of the engine's log-prob minus the learner's: an estimate (k1) of KL(engine || learner). "
        "Only in steps whose old log-probs the learner computes: with another engine than the built-in one, in bf16, "
        "and with `behaviour_weight` or `rejection`. With `rollout.staleness` only over tokens that the latest weights "
        "drew, if there are any."
    ),
    Metric("mismatch/k3", Mean, "nats per token", DOWN).means(
        "The same KL by the estimator k3, which is never negative and has less variance. Rounding of bf16 gives 1e-4 "
        "to 1e-2; more means other weights, another temperature or a stale cache."
    ),
    Metric("mismatch/max_abs_log_ratio", Max, "nats", DOWN).means(
        "Largest difference of the two log-probs of a token."
    ),
    Metric("mismatch/unexplained", Last, "nats per token", DOWN).means(
        "Mean absolute difference of the two log-probs of a token, which `guards.max_mismatch` bounds. With "
        "`rollout.staleness` over tokens of earlier weights too, less twice the movement of the policy since then "
        "(`staleness/movement`); 0 where that is more."
    ),
    Metric("engine/retries", Sum, "requests", DOWN, repeatable=False).means(
        "Requests for a response that failed and were sent again: servers gave an error, a broken reply, or none in "
        "time. Only with vLLM."
    ),
    Metric("engine/stale_responses", Sum, "responses", DOWN, repeatable=False).means(
        "Responses that other weights made than those of the last push, and that were sampled again: a server was "
        "started anew, or somebody else pushes weights to it. Only with vLLM."
    ),
    Metric("engine/restarts", Last, "restarts", DOWN, repeatable=False).means(
        "Restarts of servers that the run started and that ended, since the run began. Only with vLLM."
    ),
    Metric("mismatch/missing_logprobs", Sum, "tokens", DOWN).means(
        "Tokens whose log-prob the engine did not give, or not as a finite number. The learner's takes its place, with "
        "a behaviour weight of 1."
    ),
)
STALENESS = (
    Metric("staleness/mean_steps", Mean, "steps").means(
        "Mean over tokens of how many steps ago the weights that drew it were trained last. Only with "
        "`rollout.staleness`, as all metrics of this group."
    ),
    Metric("staleness/max_steps", Max, "steps").means("The same of the oldest token; at most `rollout.staleness`."),
    Metric("staleness/k3", Mean, "nats per token", DOWN).means(
        "KL of the weights that sampled from those that train, by the estimator k3, over tokens that earlier weights "
        "drew."
    ),
    Metric("staleness/movement", Last, "nats per token").means(
        "Mean absolute change of a token's log-prob by the updates of this step, over eight of its responses."
    ),
    Metric("staleness/effective_fraction", Last, "fraction", UP).means(
        "Effective sample size of the ratios of the two policies as a fraction of the tokens: (sum w)^2 / (n sum w^2). "
        "1 means that the samples are as good as new ones."
    ),
    Metric("staleness/interrupted_fraction", Mean, "fraction").means(
        "Responses whose tokens come from more than one version of the weights."
    ),
    Metric("staleness/learner_idle_fraction", Mean, "fraction", DOWN, repeatable=False).means(
        "With `rollout.staleness`, share of the time since the last step's responses in which the learner waited for "
        "these."
    ),
    Metric("staleness/engine_idle_fraction", Mean, "fraction", DOWN, repeatable=False).means(
        "Share of this time in which nothing was sampled. Where both are idle, the bound is too low."
    ),
)
