"""Metrics of responses to held-out prompts."""

from proximo.metrics.definitions import Better, Metric
from proximo.metrics.values import Deviation, Last, Mean, Sum

GENERATED = (
    Metric(
        name="evaluation/score",
        reduction=Mean,
        unit="score",
        definition="Mean score of the answers to the held-out prompts.",
        better=Better.UP,
    ),
    Metric(
        name="evaluation/score_std",
        reduction=Deviation,
        unit="score",
        definition="Population standard deviation of those scores.",
    ),
    Metric(
        name="evaluation/score/<component>",
        reduction=Mean,
        unit="score",
        definition="Mean over those answers of one component of the score.",
        better=Better.UP,
    ),
    Metric(
        name="evaluation/task_reward",
        reduction=Mean,
        unit="score",
        definition="Mean over those answers of the component that `ppo.task_reward` names. Only with that key.",
        better=Better.UP,
    ),
    Metric(
        name="evaluation/gold",
        reduction=Mean,
        unit="score",
        definition="Mean over those answers of the gold score. Only in runs with a gold source.",
        better=Better.UP,
    ),
    Metric(
        name="evaluation/pass_at_<component>",
        reduction=Mean,
        unit="fraction",
        definition="Mean over held-out prompts of the probability that one of k answers has a `ppo.task_reward` of "
        "at least `ppo.solved_score`. The estimate from all scored answers to the prompt is unbiased: 1 - C(n - "
        "c, k) / C(n, k). For k = 1, 2, 4 and so on up to `ppo.evaluation_samples_per_prompt`.",
        better=Better.UP,
    ),
    Metric(
        name="evaluation/reference_score",
        reduction=Mean,
        unit="score",
        definition="Mean score of the reference's answers to the same prompts. Only with `ppo.evaluate_reference`.",
    ),
    Metric(
        name="evaluation/win_rate",
        reduction=Mean,
        unit="fraction",
        definition="Fraction of held-out answers with a higher score than the reference's answer to the same prompt, "
        "sampled with the same random numbers; a tie counts half. Only with `ppo.evaluate_reference`.",
        better=Better.UP,
    ),
    Metric(
        name="evaluation/kl",
        reduction=Mean,
        unit="nats",
        definition="Mean over those answers of the sum of k1 over tokens, as in kl/sequence.",
    ),
    Metric(
        name="evaluation/k3_per_token",
        reduction=Mean,
        unit="nats per token",
        definition="k3 of the policy from the reference, mean over the tokens of the responses: an estimate of the KL "
        "that is never negative. Only in runs without a reward, whose best checkpoint has the lowest.",
        better=Better.DOWN,
    ),
    Metric(
        name="evaluation/tokens",
        reduction=Mean,
        unit="tokens",
        definition="Mean number of tokens of those answers.",
    ),
    Metric(
        name="evaluation/finished_fraction",
        reduction=Mean,
        unit="fraction",
        definition="Fraction of those answers that ended with a stop token.",
        better=Better.UP,
    ),
    Metric(
        name="evaluation/distinct_2",
        reduction=Last,
        unit="fraction",
        definition="Number of distinct token bigrams divided by the number of all bigrams, over all those answers.",
    ),
    Metric(
        name="evaluation/unscored",
        reduction=Sum,
        unit="responses",
        definition="Answers excluded from these metrics because of a fault outside the answer.",
        better=Better.DOWN,
    ),
    Metric(
        name="evaluation/responses",
        reduction=Sum,
        unit="responses",
        definition="Number of answers in these means.",
    ),
)
