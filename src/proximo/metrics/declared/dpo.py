"""The metrics of DPO training. Not those of held-out pairs: see evaluation."""

from proximo.metrics.definitions import Better, Metric, Phase
from proximo.metrics.values import Last, Mean, Sum

DPO = (
    Metric(
        name="dpo/loss",
        reduction=Mean,
        unit="nats per pair",
        definition="The DPO loss, mean over the pairs of the step. ln 2 = 0.693 is that of the reference itself.",
        phase=Phase.DPO,
        better=Better.DOWN,
    ),
    Metric(
        name="dpo/accuracy",
        reduction=Mean,
        unit="fraction",
        definition="Share of pairs whose chosen answer has the higher implicit reward; a tie counts half.",
        phase=Phase.DPO,
        better=Better.UP,
    ),
    Metric(
        name="dpo/margin",
        reduction=Mean,
        unit="score",
        definition="Mean over pairs of the chosen answer's implicit reward minus the rejected one's.",
        phase=Phase.DPO,
        better=Better.UP,
    ),
    Metric(
        name="dpo/reward_chosen",
        reduction=Mean,
        unit="score",
        definition="Mean implicit reward of the chosen answers: beta times policy log-prob minus reference log-prob.",
        phase=Phase.DPO,
    ),
    Metric(
        name="dpo/reward_rejected",
        reduction=Mean,
        unit="score",
        definition="Mean implicit reward of the rejected answers.",
        phase=Phase.DPO,
    ),
    Metric(
        name="dpo/logprob_chosen",
        reduction=Mean,
        unit="nats",
        definition="Mean log-prob that the policy gives the whole chosen answers. The loss sees differences only, so "
        "it may fall while the margin grows.",
        phase=Phase.DPO,
    ),
    Metric(
        name="dpo/logprob_rejected",
        reduction=Mean,
        unit="nats",
        definition="Mean log-prob that the policy gives the whole rejected answers.",
        phase=Phase.DPO,
    ),
    Metric(
        name="dpo/gradient_norm",
        reduction=Mean,
        unit="norm",
        definition="L2 norm of the gradient before clipping, mean over updates.",
        phase=Phase.DPO,
    ),
    Metric(
        name="dpo/learning_rate",
        reduction=Last,
        unit="per update",
        definition="Learning rate of the last update.",
        phase=Phase.DPO,
    ),
    Metric(
        name="dpo/pairs",
        reduction=Sum,
        unit="pairs",
        definition="Pairs of the step.",
        phase=Phase.DPO,
    ),
    Metric(
        name="dpo/skipped_updates",
        reduction=Sum,
        unit="updates",
        definition="Updates left out because the gradient was not finite.",
        phase=Phase.DPO,
        better=Better.DOWN,
    ),
)
