"""The metrics of held-out data, for all trainers. Not those of training batches.

Evaluation draws its random numbers from a purpose of its own that knows no step, so two steps answer the same prompts
with the same numbers and differ by the policy alone.
"""

from proximo.metrics.definitions import Better, Metric, Phase
from proximo.metrics.values import Deviation, ExponentialMean, Last, Mean, Sum

GENERATED = (
    Metric(
        name="evaluation/score",
        reduction=Mean,
        unit="score",
        definition="Mean score of the answers to the held-out prompts.",
        phase=Phase.EVALUATION,
        better=Better.UP,
    ),
    Metric(
        name="evaluation/score_std",
        reduction=Deviation,
        unit="score",
        definition="Standard deviation of those scores (divided by their number).",
        phase=Phase.EVALUATION,
    ),
    Metric(
        name="evaluation/score/<component>",
        reduction=Mean,
        unit="score",
        definition="Mean over those answers of one named part of the score.",
        phase=Phase.EVALUATION,
        better=Better.UP,
    ),
    Metric(
        name="evaluation/task_reward",
        reduction=Mean,
        unit="score",
        definition="Mean over those answers of the component that `ppo.task_reward` names. Only with that key.",
        phase=Phase.EVALUATION,
        better=Better.UP,
    ),
    Metric(
        name="evaluation/gold",
        reduction=Mean,
        unit="score",
        definition="Mean over those answers of the held-out gold source. Only in runs that have one.",
        phase=Phase.EVALUATION,
        better=Better.UP,
    ),
    Metric(
        name="evaluation/pass_at_<component>",
        reduction=Mean,
        unit="fraction",
        definition="Mean over held-out prompts of the chance that one of k answers has a `ppo.task_reward` of "
        "`ppo.solved_score` or more, estimated without bias from all answers to the prompt that have a score: "
        "1 - C(n - c, k) / C(n, k). For k = 1, 2, 4 and so on up to `ppo.evaluation_samples_per_prompt`.",
        phase=Phase.EVALUATION,
        better=Better.UP,
    ),
    Metric(
        name="evaluation/reference_score",
        reduction=Mean,
        unit="score",
        definition="Mean score of the reference's answers to the same prompts. Only with `ppo.evaluate_reference`.",
        phase=Phase.EVALUATION,
    ),
    Metric(
        name="evaluation/win_rate",
        reduction=Mean,
        unit="fraction",
        definition="Share of held-out answers with a higher score than the reference's answer to the same prompt, "
        "drawn with the same random numbers; a draw counts half. Only with `ppo.evaluate_reference`.",
        phase=Phase.EVALUATION,
        better=Better.UP,
    ),
    Metric(
        name="evaluation/kl",
        reduction=Mean,
        unit="nats",
        definition="Mean over those answers of the token sum of k1, as kl/sequence.",
        phase=Phase.EVALUATION,
    ),
    Metric(
        name="evaluation/tokens",
        reduction=Mean,
        unit="tokens",
        definition="Mean number of tokens of those answers.",
        phase=Phase.EVALUATION,
    ),
    Metric(
        name="evaluation/finished_fraction",
        reduction=Mean,
        unit="fraction",
        definition="Share of those answers that the policy ended itself.",
        phase=Phase.EVALUATION,
        better=Better.UP,
    ),
    Metric(
        name="evaluation/distinct_2",
        reduction=Last,
        unit="fraction",
        definition="Different pairs of neighbouring tokens over all such pairs, in those answers together.",
        phase=Phase.EVALUATION,
    ),
    Metric(
        name="evaluation/unscored",
        reduction=Sum,
        unit="responses",
        definition="Answers left out of all of these because of a fault that is not theirs.",
        phase=Phase.EVALUATION,
        better=Better.DOWN,
    ),
    Metric(
        name="evaluation/responses",
        reduction=Sum,
        unit="responses",
        definition="Answers that these means are over.",
        phase=Phase.EVALUATION,
    ),
)

LIKELIHOOD = (
    Metric(
        name="evaluation/loss",
        reduction=Mean,
        unit="nats",
        definition="The training loss on held-out data: nats per token (SFT) or per pair (reward model, DPO).",
        phase=Phase.EVALUATION,
        better=Better.DOWN,
    ),
    Metric(
        name="evaluation/perplexity",
        reduction=ExponentialMean,
        unit="perplexity",
        definition="exp of the mean nats per held-out token (SFT).",
        phase=Phase.EVALUATION,
        better=Better.DOWN,
    ),
    Metric(
        name="evaluation/bits_per_character",
        reduction=Mean,
        unit="bits",
        definition="Bits of all held-out tokens over the characters that they stand for (SFT): comparable between "
        "tokenizers.",
        phase=Phase.EVALUATION,
        better=Better.DOWN,
    ),
)

PREFERENCE = (
    Metric(
        name="evaluation/pairs",
        reduction=Sum,
        unit="pairs",
        definition="Held-out pairs that these means are over.",
        phase=Phase.EVALUATION,
    ),
    Metric(
        name="evaluation/pair_accuracy",
        reduction=Mean,
        unit="fraction",
        definition="Share of held-out pairs whose chosen answer scores higher; a tie counts half.",
        phase=Phase.EVALUATION,
        better=Better.UP,
    ),
    Metric(
        name="evaluation/margin_mean",
        reduction=Mean,
        unit="score",
        definition="Mean over held-out pairs of chosen score minus rejected score.",
        phase=Phase.EVALUATION,
        better=Better.UP,
    ),
    Metric(
        name="evaluation/score_chosen_mean",
        reduction=Mean,
        unit="score",
        definition="Mean score of the chosen answers of the held-out pairs.",
        phase=Phase.EVALUATION,
    ),
    Metric(
        name="evaluation/score_rejected_mean",
        reduction=Mean,
        unit="score",
        definition="Mean score of the rejected answers of the held-out pairs.",
        phase=Phase.EVALUATION,
    ),
    Metric(
        name="evaluation/logprob_chosen",
        reduction=Mean,
        unit="nats",
        definition="Mean log-prob that the policy gives the whole chosen answers of the held-out pairs (DPO).",
        phase=Phase.EVALUATION,
    ),
    Metric(
        name="evaluation/logprob_rejected",
        reduction=Mean,
        unit="nats",
        definition="Mean log-prob that the policy gives the whole rejected answers of the held-out pairs (DPO).",
        phase=Phase.EVALUATION,
    ),
    Metric(
        name="evaluation/calibration_error",
        reduction=Last,
        unit="fraction",
        definition="Expected calibration error over held-out pairs: how far the confidence of the answer that is "
        "preferred, sigmoid(|margin|), is from the share of pairs where that answer was the chosen one, mean over ten "
        "bins of confidence weighted by their pairs.",
        phase=Phase.EVALUATION,
        better=Better.DOWN,
    ),
)

EVALUATION = (*GENERATED, *LIKELIHOOD, *PREFERENCE)
