"""Metrics of a PPO step before its updates, and of held-out answers: rollout, scores, reward sources, episodes.

Means over tokens are over the response mask: no prompts, no padding, no responses that an infrastructure fault left
unscored.
"""

from proximo.metrics.definitions import DOWN, UP, Metric
from proximo.metrics.values import Deviation, Last, Max, Mean, MetricValue, Quantile, Sum

ROLLOUT = (
    Metric("response/tokens_mean", Mean, "tokens").means(
        "Mean number of tokens of a response, including its end-of-sequence token. Of an episode, all tokens after the "
        "first prompt."
    ),
    Metric("response/tokens_max", Max, "tokens").means("Number of tokens of the longest response."),
    Metric("response/finished_fraction", Mean, "fraction", UP).means(
        "Fraction of responses that ended with a stop token (`eos` or `stop`), or whose episode the environment ended "
        "(`terminated`); the others were cut."
    ),
    Metric("response/repeat_4gram", Mean, "fraction", DOWN).means(
        "Mean over responses of the fraction of 4-grams of tokens that occurred earlier in the same response. Near 1 "
        "for a response that repeats one phrase."
    ),
    Metric("response/distinct_2", Last, "fraction").means(
        "Number of distinct token pairs (bigrams) divided by the number of all bigrams, over all responses of the "
        "step. It falls when the policy repeats itself. Compare it only between steps with about the same number of "
        "tokens."
    ),
    Metric("response/unscored", Sum, "responses", DOWN).means(
        "Responses excluded from loss, baseline and statistics, because the engine aborted them or a reward source "
        "failed for a reason outside the response."
    ),
    Metric("response/sampled", Sum, "responses").means(
        "Number of responses sampled in the step, before the best were selected; all other metrics of responses, "
        "scores and rewards cover the selected ones. Only with `ppo.samples_per_prompt`."
    ),
    Metric("response/sampled_unscored", Sum, "responses", DOWN).means(
        "Number of sampled responses without a score for a reason outside the response. Only with "
        "`ppo.samples_per_prompt`."
    ),
)

SCORE = (
    Metric("score/mean", Mean, "score", UP).means(
        "Mean over responses of the raw score of the reward sources, before `ppo.score` and before any KL penalty."
    ),
    Metric("score/std", Deviation, "score").means("Population standard deviation of that score over responses."),
    Metric("score/best_fraction", Mean, "fraction", UP).means(
        "Fraction of responses whose score is the highest of the step. Near 1 little is left to learn."
    ),
    Metric("score/length_correlation", Last, "fraction").means(
        "Pearson correlation of that score with the number of tokens, over responses: -1 if every token costs the "
        "same, 1 if every token pays the same. Absent if all scores or all lengths are equal."
    ),
    Metric("score/sampled_mean", Mean, "score", UP).means(
        "Mean score of all samples, before the best are selected. Only with `ppo.samples_per_prompt`."
    ),
    Metric("score/sampled_std", Deviation, "score").means("Population standard deviation of those scores."),
    Metric("score/<component>/mean", Mean, "score", UP).means("Mean over responses of one component of the score."),
    Metric("score/task_reward_mean", Mean, "score", UP).means(
        "Mean over responses of the component that `ppo.task_reward` names, as its source returned it: how much of the "
        "task was solved. Only with `ppo.task_reward`."
    ),
    Metric("score/shaped_mean", Mean, "score").means(
        "Mean over counted responses with a score of the score after `ppo.score`, before any KL penalty. Only if "
        "`ppo.score` changes the score."
    ),
    Metric("score/shaped_std", Deviation, "score").means(
        "Standard deviation of the same score over the same responses."
    ),
    Metric("score/penalised_fraction", Mean, "fraction", DOWN).means(
        "Fraction of the same responses with a penalty of `ppo.score`. Only with a penalty."
    ),
    Metric("score/answer_mean", Mean, "score").means(
        "Mean over the prompts of the step of the score of the answers that responses are compared with: reference "
        "answers with `ppo.score.minus_reference_answer`, greedy answers with the estimator `greedy_baseline`."
    ),
    Metric("score/running_mean", Last, "score").means(
        "Mean of all scores of the run so far, including this step, after baseline, bias and scale. Only with "
        "`ppo.score.normalise`."
    ),
    Metric("score/running_std", Last, "score").means(
        "Sample standard deviation of the same scores, by which the scores of this step were divided; 0 as long as "
        "they do not differ, and then nothing is divided."
    ),
    Metric("gold/mean", Mean, "score", UP).means(
        "Mean over responses of the gold score, which is never used for training. Only in runs with a gold source."
    ),
)

EXPERIENCE = (
    Metric("reward/std", Last, "score").means(
        "Standard deviation over responses of the return, discounted by `ppo.advantage.gamma`: the shaped score minus "
        "the KL penalty, before any whitening."
    ),
    Metric("reward/mean", Mean, "score", UP).means(
        "Mean over responses of the sum of their token rewards: the shaped score minus the KL penalty; whitened with "
        "`ppo.score.whiten_rewards`."
    ),
    Metric("kl/sequence", Mean, "nats").means(
        "Mean over responses of the sum over tokens of k1 = log policy - log reference: an unbiased estimate of "
        "KL(policy || reference) of whole responses."
    ),
    Metric("kl/per_token", Mean, "nats per token").means(
        "The sum of the same k1 over all tokens, divided by the number of tokens."
    ),
    Metric("kl/k3_per_token", Mean, "nats per token").means(
        "Mean over tokens of k3 = exp(-k1) - 1 + k1: never negative, and less noisy than k1."
    ),
    Metric("kl/full_per_token", Mean, "nats per token", DOWN).means(
        "The KL of the policy from the reference over the whole vocabulary, mean over the tokens of all updates: no "
        "estimate. Only with `kl.kind: loss` and `kl.estimator: full`."
    ),
    Metric("kl/same_top_fraction", Mean, "fraction", UP).means(
        "Fraction of the same tokens at whose position the most likely token of policy and reference is the same."
    ),
    Metric("kl/coefficient", Last, "score per nat").means(
        "The cost of one nat of KL in this step. An adaptive coefficient changes after the step."
    ),
    Metric("advantage/mean", Mean, "score").means("Mean over tokens of the advantages, before standardising."),
    Metric("advantage/std", Deviation, "score").means(
        "Standard deviation over tokens of the advantages, before standardising."
    ),
    Metric("advantage/flat", Last, "fraction").means(
        "1 if the returns of the step are nearly equal compared with those of the run (`ppo.advantage.least_spread`), "
        "so that all advantages are 0 and the policy is not updated; otherwise 0. Only in runs with a value model."
    ),
    Metric("group/rollouts", Last, "rollouts", DOWN).means(
        "Rollouts of the step, each of `ppo.prompts_per_step` prompts, with `zero_variance_groups: resample`. At "
        "`resample_rounds` the step may lack groups to learn from."
    ),
    Metric("group/effective_fraction", Mean, "fraction", UP).means(
        "The effective sample fraction: fraction of the counted responses whose group has different task rewards "
        "(`ppo.task_reward`, before any shaping). The other responses teach nothing about the task. Only in runs with "
        "a group baseline."
    ),
    Metric("group/zero_variance_fraction", Mean, "fraction", DOWN).means(
        "Fraction of prompts whose responses all have the same task reward: all right, or all wrong. Only in runs with "
        "a group baseline."
    ),
    Metric("group/zero_advantage_fraction", Mean, "fraction", DOWN).means(
        "Fraction of prompts without any advantage: all their responses have the same return, with the KL, or "
        "`ppo.advantage.zero_variance_groups` excludes them. Only in runs with a group baseline."
    ),
    Metric("value/explained_variance", Last, "fraction", UP).means(
        "1 - Var(returns - values) / Var(returns) over the tokens of the step, with the values before the updates: 1 "
        "is a perfect critic, 0 a critic no better than a constant. Also 0 if all returns are equal."
    ),
    Metric("extra/<component>", Last, "that of the call").means(
        "A number that a user-defined call wrote in this step (docs/dataflow.md)."
    ),
)


def _source(name: str, reduction: type[MetricValue], unit: str) -> Metric:
    """A metric of a reward source. It is not repeatable: it depends on timing, and a resumed run has an empty cache."""
    return Metric(f"source/<component>/{name}", reduction, unit, DOWN, repeatable=False)


SOURCES = (
    _source("seconds_p50", Quantile, "seconds").means(
        "Wall-clock time to grade one answer, or one batch for a function or a reward model: half took no longer."
    ),
    _source("seconds_p95", Quantile, "seconds").means("Wall-clock time that 95% of the graded answers did not exceed."),
    _source("seconds_p99", Quantile, "seconds").means("Wall-clock time that 99% of the graded answers did not exceed."),
    _source("timeout_fraction", Mean, "fraction").means(
        "Fraction of the responses whose grading exceeded its limit: twice, or for a remote service in the last "
        "attempt."
    ),
    _source("failure_fraction", Mean, "fraction").means(
        "Fraction of the responses that this source could not score for a reason outside the response."
    ),
    _source("model_fault_fraction", Mean, "fraction").means(
        "Fraction of the responses that this source marks as faulty, with a real low score; including time-outs."
    ),
    _source("retries", Sum, "tries").means(
        "Retries after a worker died, a verifier failed, a limit was exceeded or a request failed."
    ),
    _source("worker_restarts", Sum, "workers").means("Workers that replaced one that ended or was killed."),
    Metric("source/<component>/cache_hit_fraction", Mean, "fraction", repeatable=False).means(
        "Fraction of the responses whose grade came from the cache."
    ),
)

EPISODES = (
    Metric("environment/turns_mean", Mean, "turns").means("Mean number of turns of the policy in an episode."),
    Metric("environment/turns_max", Max, "turns").means("Number of turns of the longest episode."),
    Metric("environment/terminated_fraction", Mean, "fraction").means(
        "Fraction of episodes that the environment ended: what would follow is worth 0."
    ),
    Metric("environment/truncated_fraction", Mean, "fraction").means(
        "Fraction of episodes that the environment cut: the critic's value stands for what would follow. The rest ran "
        "into a limit of the run: turns, tokens or seconds."
    ),
    Metric("environment/policy_token_fraction", Mean, "fraction").means(
        "Fraction of the tokens after the first prompt that the policy wrote; the others are observations."
    ),
    Metric("environment/forks_mean", Mean, "forks").means(
        "Mean number of turns of an episode whose prompt did not extend the tokens before it, because the chat "
        "template leaves out earlier text. Each begins a further sequence, which is computed anew."
    ),
    Metric("environment/tool_calls_mean", Mean, "calls").means("Mean number of tools called in an episode."),
    Metric("environment/malformed_calls", Sum, "calls", DOWN).means(
        "Calls of tools that could not be read; the policy was told so."
    ),
    Metric("environment/cut_observations", Sum, "messages", DOWN).means(
        "Messages of environments that were longer than `environment.max_observation_tokens`, and cut."
    ),
    Metric("environment/info/<component>", Mean, "that of the environment").means(
        "Mean over episodes of a number in the last `info` of the environment."
    ),
    Metric("environment/faults", Sum, "episodes", DOWN).means(
        "Episodes that ended because their environment failed. They have no reward and count nowhere."
    ),
    Metric("environment/faults/<component>", Sum, "episodes", DOWN).means(
        "The same by kind: `error` (it raised), `timeout`, `died`, `memory`, `invalid` (a wrong type or size), "
        "`too_long` (a first observation that fills the conversation), `engine`; of agents also `client` (two at once "
        "under one id) and `agent` (it ended without a call)."
    ),
    Metric("environment/refused_calls", Sum, "requests", DOWN).means(
        "Requests of agents that the policy's server refused: malformed, beyond a limit, too many at once, or of a "
        "trajectory that had ended."
    ),
    Metric("environment/broken_off_calls", Sum, "calls", DOWN, repeatable=False).means(
        "Calls of agents whose client left before the answer. Their tokens are dropped."
    ),
    Metric("environment/ignored_options", Sum, "options").means(
        "Options of sampling in requests of agents that had no effect, since the run decides them; the first of each "
        "name is logged."
    ),
    Metric("environment/retries", Sum, "resets", DOWN, repeatable=False).means(
        "Resets that failed and were tried again. After three failures the episode is a fault."
    ),
    Metric("environment/environment_seconds", Sum, "seconds", DOWN, repeatable=False).means(
        "Wall-clock time that environments took in the rollouts, added up over those that worked at the same time."
    ),
    Metric("environment/model_seconds", Sum, "seconds", DOWN, repeatable=False).means(
        "Wall-clock time of the rollouts in which the model decoded. Environments may have worked meanwhile."
    ),
    Metric("environment/waiting_seconds", Sum, "seconds", DOWN, repeatable=False).means(
        "Wall-clock time of the rollouts in which the model had nothing to decode, because all episodes waited for "
        "their environments."
    ),
)


GENERATED = (
    Metric("evaluation/score", Mean, "score", UP).means("Mean score of the answers to the held-out prompts."),
    Metric("evaluation/score_std", Deviation, "score").means("Population standard deviation of those scores."),
    Metric("evaluation/score/<component>", Mean, "score", UP).means(
        "Mean over those answers of one component of the score."
    ),
    Metric("evaluation/task_reward", Mean, "score", UP).means(
        "Mean over those answers of the component that `ppo.task_reward` names. Only with that key."
    ),
    Metric("evaluation/gold", Mean, "score", UP).means(
        "Mean over those answers of the gold score. Only in runs with a gold source."
    ),
    Metric("evaluation/pass_at_<component>", Mean, "fraction", UP).means(
        "Mean over held-out prompts of the probability that one of k answers has a `ppo.task_reward` of at least "
        "`ppo.solved_score`. The estimate from all scored answers to the prompt is unbiased: 1 - C(n - c, k) / C(n, "
        "k). For k = 1, 2, 4 and so on up to `ppo.evaluation_samples_per_prompt`."
    ),
    Metric("evaluation/reference_score", Mean, "score").means(
        "Mean score of the reference's answers to the same prompts. Only with `ppo.evaluate_reference`."
    ),
    Metric("evaluation/win_rate", Mean, "fraction", UP).means(
        "Fraction of held-out answers with a higher score than the reference's answer to the same prompt, sampled with "
        "the same random numbers; a tie counts half. Only with `ppo.evaluate_reference`."
    ),
    Metric("evaluation/kl", Mean, "nats").means(
        "Mean over those answers of the sum of k1 over tokens, as in kl/sequence."
    ),
    Metric("evaluation/k3_per_token", Mean, "nats per token", DOWN).means(
        "k3 of the policy from the reference, mean over the tokens of the responses: an estimate of the KL that is "
        "never negative. Only in runs without a reward, whose best checkpoint has the lowest."
    ),
    Metric("evaluation/tokens", Mean, "tokens").means("Mean number of tokens of those answers."),
    Metric("evaluation/finished_fraction", Mean, "fraction", UP).means(
        "Fraction of those answers that ended with a stop token."
    ),
    Metric("evaluation/distinct_2", Last, "fraction").means(
        "Number of distinct token bigrams divided by the number of all bigrams, over all those answers."
    ),
    Metric("evaluation/unscored", Sum, "responses", DOWN).means(
        "Answers excluded from these metrics because of a fault outside the answer."
    ),
    Metric("evaluation/responses", Sum, "responses").means("Number of answers in these means."),
    Metric("evaluation/turns", Mean, "turns").means("Mean number of turns of those episodes."),
    Metric("evaluation/tool_calls", Mean, "calls").means("Mean number of tools called in those episodes."),
    Metric("evaluation/malformed_calls", Sum, "calls", DOWN).means("Calls of tools in them that could not be read."),
    Metric("evaluation/info/<component>", Mean, "that of the environment", UP).means(
        "Mean over those episodes of a number in the last `info` of the environment."
    ),
)
