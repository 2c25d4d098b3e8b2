"""The metrics of responses to held-out prompts. Not those of training batches."""

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
        definition="Standard deviation of those scores (divided by their number).",
    ),
    Metric(
        name="evaluation/score/<component>",
        reduction=Mean,
        unit="score",
        definition="Mean over those answers of one named part of the score.",
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
        definition="Mean over those answers of the held-out gold source. Only in runs that have one.",
        better=Better.UP,
    ),
    Metric(
        name="evaluation/pass_at_<component>",
        reduction=Mean,
        unit="fraction",
        definition="Mean over held-out prompts of the chance that one of k answers has a `ppo.task_reward` of "
        "`ppo.solved_score` or more, estimated without bias from all answers to the prompt that have a score: "
        "1 - C(n - c, k) / C(n, k). For k = 1, 2, 4 and so on up to `ppo.evaluation_samples_per_prompt`.",
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
        definition="Share of held-out answers with a higher score than the reference's answer to the same prompt, "
        "drawn with the same random numbers; a draw counts half. Only with `ppo.evaluate_reference`.",
        better=Better.UP,
    ),
    Metric(
        name="evaluation/kl",
        reduction=Mean,
        unit="nats",
        definition="Mean over those answers of the token sum of k1, as kl/sequence.",
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
        definition="Share of those answers that the policy ended itself.",
        better=Better.UP,
    ),
    Metric(
        name="evaluation/distinct_2",
        reduction=Last,
        unit="fraction",
        definition="Different pairs of neighbouring tokens over all such pairs, in those answers together.",
    ),
    Metric(
        name="evaluation/unscored",
        reduction=Sum,
        unit="responses",
        definition="Answers left out of all of these because of a fault that is not theirs.",
        better=Better.DOWN,
    ),
    Metric(
        name="evaluation/responses",
        reduction=Sum,
        unit="responses",
        definition="Answers that these means are over.",
    ),
)
