"""The metrics of supervised fine-tuning and of reward model training. Not those of held-out data: see evaluation."""

from proximo.metrics.definitions import Better, Metric, Phase
from proximo.metrics.values import ExponentialMean, Last, Mean, Sum

SFT = (
    Metric(
        name="sft/loss",
        reduction=Mean,
        unit="nats per token",
        definition="Minus the log-prob of the next token, mean over the tokens of the loss mask of the step.",
        phase=Phase.SFT,
        better=Better.DOWN,
    ),
    Metric(
        name="sft/perplexity",
        reduction=ExponentialMean,
        unit="perplexity",
        definition="exp of that mean. Depends on the tokenizer; compare bits per character between tokenizers.",
        phase=Phase.SFT,
        better=Better.DOWN,
    ),
    Metric(
        name="sft/tokens",
        reduction=Sum,
        unit="tokens",
        definition="Tokens of the loss mask in the step.",
        phase=Phase.SFT,
    ),
    Metric(
        name="sft/gradient_norm",
        reduction=Mean,
        unit="norm",
        definition="L2 norm of the gradient before clipping, mean over updates.",
        phase=Phase.SFT,
    ),
    Metric(
        name="sft/learning_rate",
        reduction=Last,
        unit="per update",
        definition="Learning rate of the last update.",
        phase=Phase.SFT,
    ),
    Metric(
        name="sft/skipped_updates",
        reduction=Sum,
        unit="updates",
        definition="Updates left out because the gradient was not finite.",
        phase=Phase.SFT,
        better=Better.DOWN,
    ),
)

REWARD_MODEL = (
    Metric(
        name="reward_model/loss",
        reduction=Mean,
        unit="nats per pair",
        definition="Pairwise loss, mean over the pairs of the step. ln 2 = 0.693 is the loss of a coin.",
        phase=Phase.REWARD_MODEL,
        better=Better.DOWN,
    ),
    Metric(
        name="reward_model/pair_accuracy",
        reduction=Mean,
        unit="fraction",
        definition="Share of pairs whose chosen answer scores higher; a tie counts half.",
        phase=Phase.REWARD_MODEL,
        better=Better.UP,
    ),
    Metric(
        name="reward_model/score_chosen_mean",
        reduction=Mean,
        unit="score",
        definition="Mean score of the chosen answers. Only differences mean anything: the loss does not fix the zero.",
        phase=Phase.REWARD_MODEL,
    ),
    Metric(
        name="reward_model/score_rejected_mean",
        reduction=Mean,
        unit="score",
        definition="Mean score of the rejected answers.",
        phase=Phase.REWARD_MODEL,
    ),
    Metric(
        name="reward_model/margin_mean",
        reduction=Mean,
        unit="score",
        definition="Mean over pairs of chosen score minus rejected score. The log-odds that the model gives the pair.",
        phase=Phase.REWARD_MODEL,
        better=Better.UP,
    ),
    Metric(
        name="reward_model/gradient_norm",
        reduction=Mean,
        unit="norm",
        definition="L2 norm of the gradient before clipping, mean over updates.",
        phase=Phase.REWARD_MODEL,
    ),
    Metric(
        name="reward_model/learning_rate",
        reduction=Last,
        unit="per update",
        definition="Learning rate of the last update.",
        phase=Phase.REWARD_MODEL,
    ),
    Metric(
        name="reward_model/pairs",
        reduction=Sum,
        unit="pairs",
        definition="Pairs of the step.",
        phase=Phase.REWARD_MODEL,
    ),
    Metric(
        name="reward_model/skipped_updates",
        reduction=Sum,
        unit="updates",
        definition="Updates left out because the gradient was not finite.",
        phase=Phase.REWARD_MODEL,
        better=Better.DOWN,
    ),
)
