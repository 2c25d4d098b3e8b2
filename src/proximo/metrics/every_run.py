"""Metrics of every run: progress, times, throughput, memory. Each trainer's folder declares its own metrics."""

from proximo.metrics.definitions import DOWN, UP, Metric
from proximo.metrics.values import Last, Max, Mean, Sum

PROGRESS = (
    Metric("progress/step", Last, "steps").means(
        "Completed steps: rollout batches with all their epochs in PPO, updates elsewhere. 0 is the state before "
        "training."
    ),
    Metric("progress/epoch", Last, "epochs").means(
        "Epochs over the training data, including the fraction of the current epoch."
    ),
    Metric("progress/prompts", Last, "prompts").means(
        "Prompts (PPO), examples (SFT) or pairs (reward model) used since the start."
    ),
    Metric("progress/updates", Last, "updates").means(
        "Optimizer steps of the model that is trained, in PPO of the policy, since the start."
    ),
    Metric("progress/non_finite_metrics", Sum, "metrics", DOWN).means(
        "Metrics of this step that were NaN or infinite and are absent from its line. Written only if there are any."
    ),
    Metric("progress/sink_failures", Sum, "failures", DOWN, repeatable=False).means(
        "Failures of the sinks in `run.sinks` since the previous line. Written only if there are any."
    ),
    Metric("progress/push_failures", Sum, "failures", DOWN, repeatable=False).means(
        "Pushes to the Hub (`run.push`) that failed since the previous line. Written only if there are any."
    ),
)

FILTER = (
    Metric("filter/active", Last, "prompts").means(
        "Prompts that are in use: all except those that `data.filter` removed."
    ),
    Metric("filter/too_easy", Last, "prompts").means(
        "Prompts removed so far because their mean score in an epoch was above `data.filter.above`."
    ),
    Metric("filter/too_hard", Last, "prompts").means(
        "Prompts removed so far because their mean score in an epoch was below `data.filter.below`."
    ),
    Metric("filter/kept_beyond_bounds", Last, "prompts").means(
        "Prompts beyond a bound that were kept at the end of the last epoch, because of `max_fraction` or because too "
        "few prompts would remain for a step (with a warning)."
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
    Metric(f"time/{phase}_seconds", Sum, "seconds", DOWN, repeatable=False).means(f"Wall time of {what}.")
    for phase, what in TIMED.items()
)

SPEED = (
    Metric("throughput/rollout_tokens_per_second", Mean, "tokens per second", UP, repeatable=False).means(
        "Generated response tokens divided by the seconds of the rollout."
    ),
    Metric("throughput/train_tokens_per_second", Mean, "tokens per second", UP, repeatable=False).means(
        "Tokens (prompt and response, once per epoch and model) divided by the seconds of the updates. A prompt counts "
        "for each of its responses, also where they share its computation."
    ),
    Metric("memory/peak_mib", Max, "MiB", DOWN, repeatable=False).means(
        "Peak memory of the step: of the accelerator if there is one, otherwise of the process."
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
            Metric(f"ranks/{name}_min", Last, "tokens").means(
                f"{what}, on the rank with the fewest. As all of `ranks/`, only with several ranks."
            ),
            Metric(f"ranks/{name}_max", Last, "tokens").means(f"{what}, on the rank with the most."),
            Metric(f"ranks/{name}_imbalance", Last, "ratio", DOWN).means(
                f"{what}: the most of any rank, divided by the mean. 1 is even."
            ),
        )
    ),
    Metric("ranks/waiting_share", Last, "fraction", DOWN, repeatable=False).means(
        "Share of the time since the last step that a rank spent waiting for the others and exchanging records and "
        "replicated gradients, as the mean over ranks. It leaves out what FSDP does by itself: gathers of weights and "
        "sums of gradients of sharded models, in which a rank waits too. Where models are sharded, ranks wait for "
        "longer than this says."
    ),
    Metric("ranks/longest_waiting_share", Last, "fraction", DOWN, repeatable=False).means(
        "The same, of the rank that waited the longest."
    ),
)

RUN = (*PROGRESS, *FILTER, *TIME, *SPEED, *RANKS)
