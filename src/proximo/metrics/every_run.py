"""Metrics of every run: progress, times, throughput, memory. Metrics of a trainer are declared beside it."""

from proximo.metrics.definitions import Better, Metric
from proximo.metrics.values import Last, Max, Mean, Sum

PROGRESS = (
    Metric(
        name="progress/step",
        reduction=Last,
        unit="steps",
        definition="Completed steps: rollout batches with all their epochs in PPO, updates elsewhere. 0 is the state "
        "before training.",
    ),
    Metric(
        name="progress/epoch",
        reduction=Last,
        unit="epochs",
        definition="Epochs over the training data, including the fraction of the current epoch.",
    ),
    Metric(
        name="progress/prompts",
        reduction=Last,
        unit="prompts",
        definition="Prompts (PPO), examples (SFT) or pairs (reward model) used since the start.",
    ),
    Metric(
        name="progress/updates",
        reduction=Last,
        unit="updates",
        definition="Optimizer steps of the model that is trained, in PPO of the policy, since the start.",
    ),
    Metric(
        name="progress/non_finite_metrics",
        reduction=Sum,
        unit="metrics",
        definition="Metrics of this step that were NaN or infinite and are absent from its line. Written only if "
        "there are any.",
        better=Better.DOWN,
    ),
    Metric(
        name="progress/sink_failures",
        reduction=Sum,
        unit="failures",
        definition="Failures of the sinks in `run.sinks` since the previous line. Written only if there are any.",
        better=Better.DOWN,
        repeatable=False,
    ),
    Metric(
        name="progress/push_failures",
        reduction=Sum,
        unit="failures",
        definition="Pushes to the Hub (`run.push`) that failed since the previous line. Written only if there are any.",
        better=Better.DOWN,
        repeatable=False,
    ),
)

FILTER = (
    Metric(
        name="filter/active",
        reduction=Last,
        unit="prompts",
        definition="Prompts that are in use: all except those that `data.filter` removed.",
    ),
    Metric(
        name="filter/too_easy",
        reduction=Last,
        unit="prompts",
        definition="Prompts removed so far because their mean score in an epoch was above `data.filter.above`.",
    ),
    Metric(
        name="filter/too_hard",
        reduction=Last,
        unit="prompts",
        definition="Prompts removed so far because their mean score in an epoch was below `data.filter.below`.",
    ),
    Metric(
        name="filter/kept_beyond_bounds",
        reduction=Last,
        unit="prompts",
        definition="Prompts beyond a bound that were kept at the end of the last epoch, because of `max_fraction` or "
        "because too few prompts would remain for a step (with a warning).",
    ),
)

TIMED = {
    "rollout": "generating the responses",
    "generate_greedy": "generating the most likely responses, with the advantages `greedy_baseline`",
    "score": "scoring them",
    "reference": "the reference model's log-probs",
    "values": "the value model's forward pass",
    "policy_logprobs": "recomputing the policy's log-probs, in runs that cannot use the sampler's",
    "policy_logprobs_and_values": "the joint pass for both, in such runs when policy and value share a trunk",
    "experience": "rewards, advantages and returns",
    "train_value": "the updates of the value model",
    "train_policy": "the updates of the policy",
    "push_weights": "sending the policy's weights to the engine and comparing log-probs; next to nothing with the "
    "built-in engine",
    "move_average": "moving the average of the policy",
    "follow_policy": "moving the reference after the policy",
    "extra": "the user-defined calls of the step",
    "train_policy_and_value": "the updates of both on a shared trunk",
    "evaluate": "evaluation on held-out data",
    "step": "the whole step, without evaluation and saving",
}

TIME = tuple(
    Metric(
        name=f"time/{phase}_seconds",
        reduction=Sum,
        unit="seconds",
        definition=f"Wall time of {what}.",
        better=Better.DOWN,
        repeatable=False,
    )
    for phase, what in TIMED.items()
)

SPEED = (
    Metric(
        name="throughput/rollout_tokens_per_second",
        reduction=Mean,
        unit="tokens per second",
        definition="Generated response tokens divided by the seconds of the rollout.",
        better=Better.UP,
        repeatable=False,
    ),
    Metric(
        name="throughput/train_tokens_per_second",
        reduction=Mean,
        unit="tokens per second",
        definition="Tokens (prompt and response, once per epoch and model) divided by the seconds of the updates. "
        "A prompt counts for each of its responses, also where they share its computation.",
        better=Better.UP,
        repeatable=False,
    ),
    Metric(
        name="memory/peak_mib",
        reduction=Max,
        unit="MiB",
        definition="Peak memory of the step: of the accelerator if there is one, otherwise of the process.",
        better=Better.DOWN,
        repeatable=False,
    ),
)

COUNTED = {
    "trained_tokens": "Tokens that the updates of this step computed, a shared prompt once",
    "sampled_tokens": "Tokens that the rollout of this step generated",
}

RANKS = (
    *(
        metric
        for name, what in COUNTED.items()
        for metric in (
            Metric(
                name=f"ranks/{name}_min",
                reduction=Last,
                unit="tokens",
                definition=f"{what}, on the rank with the fewest. As all of `ranks/`, only with several ranks.",
            ),
            Metric(
                name=f"ranks/{name}_max",
                reduction=Last,
                unit="tokens",
                definition=f"{what}, on the rank with the most.",
            ),
            Metric(
                name=f"ranks/{name}_imbalance",
                reduction=Last,
                unit="ratio",
                definition=f"{what}: the most of any rank, divided by the mean. 1 is even.",
                better=Better.DOWN,
            ),
        )
    ),
    Metric(
        name="ranks/waiting_share",
        reduction=Last,
        unit="fraction",
        definition="Share of the time since the last step that a rank spent waiting for the others and exchanging "
        "records and replicated gradients, as the mean over ranks. It leaves out what FSDP does by itself: gathers of "
        "weights and sums of gradients of sharded models, in which a rank waits too. Where models are sharded, ranks "
        "wait for longer than this says.",
        better=Better.DOWN,
        repeatable=False,
    ),
    Metric(
        name="ranks/longest_waiting_share",
        reduction=Last,
        unit="fraction",
        definition="The same, of the rank that waited the longest.",
        better=Better.DOWN,
        repeatable=False,
    ),
)

RUN = (*PROGRESS, *FILTER, *TIME, *SPEED, *RANKS)
