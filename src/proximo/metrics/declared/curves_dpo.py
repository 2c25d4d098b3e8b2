"""The curves of DPO. Not those of its speed, which every trainer of pairs shares."""

from proximo.metrics.curves import Curve, Section, Trace, held_out

DPO = (
    Curve(
        key="accuracy",
        title="Pair accuracy",
        unit="fraction of pairs",
        traces=(Trace("dpo/accuracy", "training"), held_out("evaluation/pair_accuracy")),
        healthy="Starts at 0.5, where policy and reference are one, and climbs. Training far above held out is "
        "learning by heart.",
        guide=0.5,
        share=True,
    ),
    Curve(
        key="loss",
        title="Loss",
        unit="nats per pair",
        traces=(Trace("dpo/loss", "training"), held_out("evaluation/loss")),
        healthy="Starts at ln 2 = 0.69 and falls. Held out rising: stop at the lowest point.",
        guide=0.6931471805599453,
    ),
    Curve(
        key="rewards",
        title="Implicit rewards of the two answers",
        unit="score",
        traces=(Trace("dpo/reward_chosen", "chosen"), Trace("dpo/reward_rejected", "rejected")),
        healthy="They part. Best the chosen one stays at 0 or above; both falling is common, and harmless while the "
        "chosen one falls little.",
        guide=0.0,
    ),
    Curve(
        key="logprobs",
        title="Log-probs of the two answers, held out",
        unit="nats per answer",
        traces=(Trace("evaluation/logprob_chosen", "chosen"), Trace("evaluation/logprob_rejected", "rejected")),
        healthy="The rejected one falls. The chosen one falling with it: likelihood goes to answers that are in no "
        "pair, so read what the policy writes.",
    ),
    Curve(
        key="calibration-error",
        title="Calibration error",
        unit="fraction",
        traces=(held_out("evaluation/calibration_error"),),
        healthy="Below about 0.05. Rising: the policy grows surer of the pairs than it has reason to be.",
        section=Section.MORE,
    ),
    Curve(
        key="gradients",
        title="Gradient norm",
        unit="norm before clipping",
        traces=(Trace("dpo/gradient_norm", "training"),),
        healthy="Falls as pairs are told apart.",
        section=Section.MORE,
    ),
    Curve(
        key="learning-rate",
        title="Learning rate",
        unit="per update",
        traces=(Trace("dpo/learning_rate", "training"),),
        healthy="As the recipe says.",
        section=Section.MORE,
    ),
)
