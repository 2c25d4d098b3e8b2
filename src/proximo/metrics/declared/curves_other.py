"""The curves of supervised fine-tuning and of reward model training. Not those of PPO."""

from proximo.metrics.curves import Curve, Section, Trace, held_out

MEMORY = Curve(
    key="memory",
    title="Peak memory",
    unit="MiB",
    traces=(Trace("memory/peak_mib", "peak"),),
    healthy="Level after the first steps. A steady climb is a leak.",
    section=Section.SPEED,
    from_zero=True,
)

SPEED = (
    Curve(
        key="throughput",
        title="Throughput",
        unit="tokens per second",
        traces=(Trace("throughput/train_tokens_per_second", "training"),),
        healthy="Level, but for the lengths of what is read. Falling: something else wants the machine, or memory runs "
        "short.",
        section=Section.SPEED,
        from_zero=True,
    ),
    Curve(
        key="time",
        title="Time of a step",
        unit="seconds",
        traces=(Trace("time/step_seconds", "step"),),
        healthy="Level. Evaluation and saving are not in it.",
        section=Section.SPEED,
        from_zero=True,
    ),
    MEMORY,
)

SFT = (
    Curve(
        key="loss",
        title="Loss",
        unit="nats per token",
        traces=(Trace("sft/loss", "training"), held_out("evaluation/loss")),
        healthy="Both fall and stay together. Held out rising while training falls: it learns by heart, so stop at "
        "the lowest point.",
    ),
    Curve(
        key="bits",
        title="Bits per character",
        unit="bits",
        traces=(held_out("evaluation/bits_per_character"),),
        healthy="Falls. The figure to compare with other models: it does not depend on the tokenizer.",
    ),
    Curve(
        key="gradients",
        title="Gradient norm",
        unit="norm before clipping",
        traces=(Trace("sft/gradient_norm", "training"),),
        healthy="Falls from a high start, then steady.",
        section=Section.MORE,
    ),
    Curve(
        key="learning-rate",
        title="Learning rate",
        unit="per update",
        traces=(Trace("sft/learning_rate", "training"),),
        healthy="As the recipe says.",
        section=Section.MORE,
    ),
)

REWARD = (
    Curve(
        key="accuracy",
        title="Pair accuracy",
        unit="fraction of pairs",
        traces=(Trace("reward_model/pair_accuracy", "training"), held_out("evaluation/pair_accuracy")),
        healthy="Held out well above 0.5, the level of a coin. It cannot pass the share of pairs that are labelled "
        "right; training far above held out is learning by heart.",
        guide=0.5,
        share=True,
    ),
    Curve(
        key="loss",
        title="Loss",
        unit="nats per pair",
        traces=(Trace("reward_model/loss", "training"), held_out("evaluation/loss")),
        healthy="Starts at ln 2 = 0.69, the loss of a coin, and falls. Held out rising: stop at the lowest point.",
        guide=0.6931471805599453,
    ),
    Curve(
        key="scores",
        title="Scores of the two answers",
        unit="score",
        traces=(
            Trace("reward_model/score_chosen_mean", "chosen"),
            Trace("reward_model/score_rejected_mean", "rejected"),
        ),
        healthy="They part. Only the distance means anything; both drifting one way does no harm unless it is far.",
    ),
    Curve(
        key="calibration-error",
        title="Calibration error",
        unit="fraction",
        traces=(held_out("evaluation/calibration_error"),),
        healthy="Below about 0.05. High with a good accuracy: the model is surer than it has reason to be.",
    ),
    Curve(
        key="gradients",
        title="Gradient norm",
        unit="norm before clipping",
        traces=(Trace("reward_model/gradient_norm", "training"),),
        healthy="Steady.",
        section=Section.MORE,
    ),
    Curve(
        key="learning-rate",
        title="Learning rate",
        unit="per update",
        traces=(Trace("reward_model/learning_rate", "training"),),
        healthy="As the recipe says.",
        section=Section.MORE,
    ),
)
