"""Metrics of a PPO step before its updates, and of held-out answers: rollout, scores, reward sources, episodes.

Means over tokens are over the response mask: no prompts, no padding, no responses that an infrastructure fault left
unscored.
"""

from proximo.metrics.definitions import DOWN, UP, Metric
from proximo.metrics.values import Deviation, Last, Max, Mean, MetricValue, Quantile, Sum

ROLLOUT = (
    Metric("response/tokens_mean", Mean, "tokens"),
    Metric("response/tokens_max", Max, "tokens"),
    Metric("response/finished_fraction", Mean, "fraction", UP),
    Metric("response/repeat_4gram", Mean, "fraction", DOWN),
    Metric("response/distinct_2", Last, "fraction"),
    Metric("response/unscored", Sum, "responses", DOWN),
    Metric("response/sampled", Sum, "responses"),
    Metric("response/sampled_unscored", Sum, "responses", DOWN),
)

SCORE = (
    Metric("score/mean", Mean, "score", UP),
    Metric("score/std", Deviation, "score"),
    Metric("score/best_fraction", Mean, "fraction", UP),
    Metric("score/length_correlation", Last, "fraction"),
    Metric("score/sampled_mean", Mean, "score", UP),
    Metric("score/sampled_std", Deviation, "score"),
    Metric("score/<component>/mean", Mean, "score", UP),
    Metric("score/task_reward_mean", Mean, "score", UP),
    Metric("score/shaped_mean", Mean, "score"),
    Metric("score/shaped_std", Deviation, "score"),
    Metric("score/penalised_fraction", Mean, "fraction", DOWN),
    Metric("score/answer_mean", Mean, "score"),
    Metric("score/running_mean", Last, "score"),
    Metric("score/running_std", Last, "score"),
    Metric("gold/mean", Mean, "score", UP),
)

EXPERIENCE = (
    Metric("reward/std", Last, "score"),
    Metric("reward/mean", Mean, "score", UP),
    Metric("kl/sequence", Mean, "nats"),
    Metric("kl/per_token", Mean, "nats per token"),
    Metric("kl/k3_per_token", Mean, "nats per token"),
    Metric("kl/full_per_token", Mean, "nats per token", DOWN),
    Metric("kl/same_top_fraction", Mean, "fraction", UP),
    Metric("kl/coefficient", Last, "score per nat"),
    Metric("advantage/mean", Mean, "score"),
    Metric("advantage/std", Deviation, "score"),
    Metric("advantage/flat", Last, "fraction"),
    Metric("group/rollouts", Last, "rollouts", DOWN),
    Metric("group/effective_fraction", Mean, "fraction", UP),
    Metric("group/zero_variance_fraction", Mean, "fraction", DOWN),
    Metric("group/zero_advantage_fraction", Mean, "fraction", DOWN),
    Metric("value/explained_variance", Last, "fraction", UP),
    Metric("extra/<component>", Last, "that of the call"),
)


def _source(name: str, reduction: type[MetricValue], unit: str) -> Metric:
    """A metric of a reward source. It is not repeatable: it depends on timing, and a resumed run has an empty cache."""
    return Metric(f"source/<component>/{name}", reduction, unit, DOWN, repeatable=False)


SOURCES = (
    _source("seconds_p50", Quantile, "seconds"),
    _source("seconds_p95", Quantile, "seconds"),
    _source("seconds_p99", Quantile, "seconds"),
    _source("timeout_fraction", Mean, "fraction"),
    _source("failure_fraction", Mean, "fraction"),
    _source("model_fault_fraction", Mean, "fraction"),
    _source("retries", Sum, "tries"),
    _source("worker_restarts", Sum, "workers"),
    Metric("source/<component>/cache_hit_fraction", Mean, "fraction", repeatable=False),
)

EPISODES = (
    Metric("environment/turns_mean", Mean, "turns"),
    Metric("environment/turns_max", Max, "turns"),
    Metric("environment/terminated_fraction", Mean, "fraction"),
    Metric("environment/truncated_fraction", Mean, "fraction"),
    Metric("environment/policy_token_fraction", Mean, "fraction"),
    Metric("environment/forks_mean", Mean, "forks"),
    Metric("environment/tool_calls_mean", Mean, "calls"),
    Metric("environment/malformed_calls", Sum, "calls", DOWN),
    Metric("environment/cut_observations", Sum, "messages", DOWN),
    Metric("environment/info/<component>", Mean, "that of the environment"),
    Metric("environment/faults", Sum, "episodes", DOWN),
    Metric("environment/faults/<component>", Sum, "episodes", DOWN),
    Metric("environment/refused_calls", Sum, "requests", DOWN),
    Metric("environment/broken_off_calls", Sum, "calls", DOWN, repeatable=False),
    Metric("environment/ignored_options", Sum, "options"),
    Metric("environment/retries", Sum, "resets", DOWN, repeatable=False),
    Metric("environment/environment_seconds", Sum, "seconds", DOWN, repeatable=False),
    Metric("environment/model_seconds", Sum, "seconds", DOWN, repeatable=False),
    Metric("environment/waiting_seconds", Sum, "seconds", DOWN, repeatable=False),
)


GENERATED = (
    Metric("evaluation/score", Mean, "score", UP),
    Metric("evaluation/score_std", Deviation, "score"),
    Metric("evaluation/score/<component>", Mean, "score", UP),
    Metric("evaluation/task_reward", Mean, "score", UP),
    Metric("evaluation/gold", Mean, "score", UP),
    Metric("evaluation/pass_at_<component>", Mean, "fraction", UP),
    Metric("evaluation/reference_score", Mean, "score"),
    Metric("evaluation/win_rate", Mean, "fraction", UP),
    Metric("evaluation/kl", Mean, "nats"),
    Metric("evaluation/k3_per_token", Mean, "nats per token", DOWN),
    Metric("evaluation/tokens", Mean, "tokens"),
    Metric("evaluation/finished_fraction", Mean, "fraction", UP),
    Metric("evaluation/distinct_2", Last, "fraction"),
    Metric("evaluation/unscored", Sum, "responses", DOWN),
    Metric("evaluation/responses", Sum, "responses"),
    Metric("evaluation/turns", Mean, "turns"),
    Metric("evaluation/tool_calls", Mean, "calls"),
    Metric("evaluation/malformed_calls", Sum, "calls", DOWN),
    Metric("evaluation/info/<component>", Mean, "that of the environment", UP),
)
