"""Metrics on held-out data that several trainers share. Metrics of one trainer are declared beside it.

Evaluation draws its random numbers from a purpose of its own that knows no step, so two steps answer the same prompts
with the same numbers and differ by the policy alone.
"""

from proximo.metrics.definitions import Better, Metric
from proximo.metrics.values import Last, Mean, Sum

HELD_OUT_LOSS = Metric(
    name="evaluation/loss",
    reduction=Mean,
    unit="nats",
    definition="The training loss on held-out data: nats per token, or per pair when training on pairs; with KTO the "
    "weight lost per answer.",
    better=Better.DOWN,
)

PAIRS = (
    Metric(
        name="evaluation/pairs",
        reduction=Sum,
        unit="pairs",
        definition="Number of held-out pairs in these means.",
    ),
    Metric(
        name="evaluation/pair_accuracy",
        reduction=Mean,
        unit="fraction",
        definition="Fraction of held-out pairs whose chosen answer scores higher; a tie counts half.",
        better=Better.UP,
    ),
    Metric(
        name="evaluation/margin_mean",
        reduction=Mean,
        unit="score",
        definition="Mean over held-out pairs of chosen score minus rejected score.",
        better=Better.UP,
    ),
    Metric(
        name="evaluation/score_chosen_mean",
        reduction=Mean,
        unit="score",
        definition="Mean score of the chosen answers of the held-out pairs.",
    ),
    Metric(
        name="evaluation/score_rejected_mean",
        reduction=Mean,
        unit="score",
        definition="Mean score of the rejected answers of the held-out pairs.",
    ),
)

CALIBRATION = Metric(
    name="evaluation/calibration_error",
    reduction=Last,
    unit="fraction",
    definition="Expected calibration error over held-out pairs: the difference between the confidence in the "
    "preferred answer, sigmoid(|margin|), and the fraction of pairs in which that answer was the chosen one; "
    "mean over ten bins of confidence, weighted by their pairs.",
    better=Better.DOWN,
)
