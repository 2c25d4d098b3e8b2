"""How far the engine that sampled is from the learner, in steps in which the learner computes the log-probs itself."""

from proximo.metrics.definitions import Better, Metric
from proximo.metrics.values import Last, Max, Mean, Sum

MISMATCH = (
    Metric(
        name="mismatch/kl",
        reduction=Mean,
        unit="nats per token",
        definition="Mean over tokens of the engine's log-prob minus the learner's: an estimate (k1) of KL(engine "
        "|| learner). Only in steps whose old log-probs the learner computes: with another engine than the "
        "built-in one, in bf16, and with `behaviour_weight` or `rejection`. With `rollout.staleness` only over tokens "
        "that the latest weights drew, if there are any.",
    ),
    Metric(
        name="mismatch/k3",
        reduction=Mean,
        unit="nats per token",
        definition="The same KL by the estimator k3, which is never negative and has less variance. Rounding of bf16 "
        "gives 1e-4 to 1e-2; more means other weights, another temperature or a stale cache.",
        better=Better.DOWN,
    ),
    Metric(
        name="mismatch/max_abs_log_ratio",
        reduction=Max,
        unit="nats",
        definition="Largest difference of the two log-probs of a token.",
        better=Better.DOWN,
    ),
    Metric(
        name="mismatch/unexplained",
        reduction=Last,
        unit="nats per token",
        definition="Mean absolute difference of the two log-probs of a token, which `guards.max_mismatch` bounds. With "
        "`rollout.staleness` over tokens of earlier weights too, less twice the movement of the policy since then "
        "(`staleness/movement`); 0 where that is more.",
        better=Better.DOWN,
    ),
    Metric(
        name="engine/retries",
        reduction=Sum,
        unit="requests",
        definition="Requests for a response that failed and were sent again: servers gave an error, a broken reply, or "
        "none in time. Only with vLLM.",
        better=Better.DOWN,
        repeatable=False,
    ),
    Metric(
        name="engine/stale_responses",
        reduction=Sum,
        unit="responses",
        definition="Responses that other weights made than those of the last push, and that were sampled again: a "
        "server was started anew, or somebody else pushes weights to it. Only with vLLM.",
        better=Better.DOWN,
        repeatable=False,
    ),
    Metric(
        name="mismatch/missing_logprobs",
        reduction=Sum,
        unit="tokens",
        definition="Tokens whose log-prob the engine did not give, or not as a finite number. The learner's takes its "
        "place, with a behaviour weight of 1.",
        better=Better.DOWN,
    ),
)
STALENESS = (
    Metric(
        name="staleness/mean_steps",
        reduction=Mean,
        unit="steps",
        definition="Mean over tokens of how many steps ago the weights that drew it were trained last. Only with "
        "`rollout.staleness`, as all metrics of this group.",
    ),
    Metric(
        name="staleness/max_steps",
        reduction=Max,
        unit="steps",
        definition="The same of the oldest token; at most `rollout.staleness`.",
    ),
    Metric(
        name="staleness/k3",
        reduction=Mean,
        unit="nats per token",
        definition="KL of the weights that sampled from those that train, by the estimator k3, over tokens that "
        "earlier weights drew.",
        better=Better.DOWN,
    ),
    Metric(
        name="staleness/movement",
        reduction=Last,
        unit="nats per token",
        definition="Mean absolute change of a token's log-prob by the updates of this step, over eight of its "
        "responses.",
    ),
    Metric(
        name="staleness/effective_fraction",
        reduction=Last,
        unit="fraction",
        definition="Effective sample size of the ratios of the two policies as a fraction of the tokens: "
        "(sum w)^2 / (n sum w^2). 1 means that the samples are as good as new ones.",
        better=Better.UP,
    ),
    Metric(
        name="staleness/interrupted_fraction",
        reduction=Mean,
        unit="fraction",
        definition="Responses whose tokens come from more than one version of the weights.",
    ),
    Metric(
        name="staleness/learner_idle_fraction",
        reduction=Mean,
        unit="fraction",
        definition="With `rollout.staleness`, share of the time since the last step's responses in which the learner "
        "waited for these.",
        better=Better.DOWN,
        repeatable=False,
    ),
    Metric(
        name="staleness/engine_idle_fraction",
        reduction=Mean,
        unit="fraction",
        definition="Share of this time in which nothing was sampled. Where both are idle, the bound is too low.",
        better=Better.DOWN,
        repeatable=False,
    ),
)
