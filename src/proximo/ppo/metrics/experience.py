"""Metrics of a PPO step before its updates: rollout, scores, experience.

Means over tokens are over the response mask: no prompts, no padding, no responses that an infrastructure fault left
unscored.
"""

from proximo.metrics.definitions import Better, Metric
from proximo.metrics.values import Deviation, Last, Max, Mean, Sum

ROLLOUT = (
    Metric(
        name="response/tokens_mean",
        reduction=Mean,
        unit="tokens",
        definition="Mean number of tokens of a response, including its end-of-sequence token.",
    ),
    Metric(
        name="response/tokens_max",
        reduction=Max,
        unit="tokens",
        definition="Number of tokens of the longest response.",
    ),
    Metric(
        name="response/finished_fraction",
        reduction=Mean,
        unit="fraction",
        definition="Fraction of responses that ended with a stop token (`eos` or `stop`); the others were cut at the "
        "limit.",
        better=Better.UP,
    ),
    Metric(
        name="response/repeat_4gram",
        reduction=Mean,
        unit="fraction",
        definition="Mean over responses of the fraction of 4-grams of tokens that occurred earlier in the same "
        "response. Near 1 for a response that repeats one phrase.",
        better=Better.DOWN,
    ),
    Metric(
        name="response/distinct_2",
        reduction=Last,
        unit="fraction",
        definition="Number of distinct token pairs (bigrams) divided by the number of all bigrams, over all "
        "responses of the step. It falls when the policy repeats itself. Compare it only between steps with "
        "about the same number of tokens.",
    ),
    Metric(
        name="response/unscored",
        reduction=Sum,
        unit="responses",
        definition="Responses excluded from loss, baseline and statistics, because the engine aborted them or a "
        "reward source failed for a reason outside the response.",
        better=Better.DOWN,
    ),
    Metric(
        name="response/sampled",
        reduction=Sum,
        unit="responses",
        definition="Number of responses sampled in the step, before the best were selected; all other metrics of "
        "responses, scores and rewards cover the selected ones. Only with `ppo.samples_per_prompt`.",
    ),
    Metric(
        name="response/sampled_unscored",
        reduction=Sum,
        unit="responses",
        definition="Number of sampled responses without a score for a reason outside the response. Only with "
        "`ppo.samples_per_prompt`.",
        better=Better.DOWN,
    ),
)

SCORE = (
    Metric(
        name="score/mean",
        reduction=Mean,
        unit="score",
        definition="Mean over responses of the raw score of the reward sources, before `ppo.score` and before any KL "
        "penalty.",
        better=Better.UP,
    ),
    Metric(
        name="score/std",
        reduction=Deviation,
        unit="score",
        definition="Population standard deviation of that score over responses.",
    ),
    Metric(
        name="score/best_fraction",
        reduction=Mean,
        unit="fraction",
        definition="Fraction of responses whose score is the highest of the step. Near 1 little is left to learn.",
        better=Better.UP,
    ),
    Metric(
        name="score/length_correlation",
        reduction=Last,
        unit="fraction",
        definition="Pearson correlation of that score with the number of tokens, over responses: -1 if every token "
        "costs the same, 1 if every token pays the same. Absent if all scores or all lengths are equal.",
    ),
    Metric(
        name="score/sampled_mean",
        reduction=Mean,
        unit="score",
        definition="Mean score of all samples, before the best are selected. Only with `ppo.samples_per_prompt`.",
        better=Better.UP,
    ),
    Metric(
        name="score/sampled_std",
        reduction=Deviation,
        unit="score",
        definition="Population standard deviation of those scores.",
    ),
    Metric(
        name="score/<component>/mean",
        reduction=Mean,
        unit="score",
        definition="Mean over responses of one component of the score.",
        better=Better.UP,
    ),
    Metric(
        name="score/task_reward_mean",
        reduction=Mean,
        unit="score",
        definition="Mean over responses of the component that `ppo.task_reward` names, as its source returned it: "
        "how much of the task was solved. Only with `ppo.task_reward`.",
        better=Better.UP,
    ),
    Metric(
        name="score/shaped_mean",
        reduction=Mean,
        unit="score",
        definition="Mean over counted responses with a score of the score after `ppo.score`, before any KL penalty. "
        "Only if `ppo.score` changes the score.",
    ),
    Metric(
        name="score/shaped_std",
        reduction=Deviation,
        unit="score",
        definition="Standard deviation of the same score over the same responses.",
    ),
    Metric(
        name="score/penalised_fraction",
        reduction=Mean,
        unit="fraction",
        definition="Fraction of the same responses with a penalty of `ppo.score`. Only with a penalty.",
        better=Better.DOWN,
    ),
    Metric(
        name="score/answer_mean",
        reduction=Mean,
        unit="score",
        definition="Mean over the prompts of the step of the score of the answers that responses are compared with: "
        "reference answers with `ppo.score.minus_reference_answer`, greedy answers with the estimator "
        "`greedy_baseline`.",
    ),
    Metric(
        name="score/running_mean",
        reduction=Last,
        unit="score",
        definition="Mean of all scores of the run so far, including this step, after baseline, bias and scale. Only "
        "with `ppo.score.normalise`.",
    ),
    Metric(
        name="score/running_std",
        reduction=Last,
        unit="score",
        definition="Sample standard deviation of the same scores, by which the scores of this step were divided; 0 "
        "as long as they do not differ, and then nothing is divided.",
    ),
    Metric(
        name="gold/mean",
        reduction=Mean,
        unit="score",
        definition="Mean over responses of the gold score, which is never used for training. Only in runs with a "
        "gold source.",
        better=Better.UP,
    ),
)

EXPERIENCE = (
    Metric(
        name="reward/std",
        reduction=Last,
        unit="score",
        definition="Standard deviation over responses of the return, discounted by `ppo.advantage.gamma`: the shaped "
        "score minus the KL penalty, before any whitening.",
    ),
    Metric(
        name="reward/mean",
        reduction=Mean,
        unit="score",
        definition="Mean over responses of the sum of their token rewards: the shaped score minus the KL penalty; "
        "whitened with `ppo.score.whiten_rewards`.",
        better=Better.UP,
    ),
    Metric(
        name="kl/sequence",
        reduction=Mean,
        unit="nats",
        definition="Mean over responses of the sum over tokens of k1 = log policy - log reference: an unbiased "
        "estimate of KL(policy || reference) of whole responses.",
    ),
    Metric(
        name="kl/per_token",
        reduction=Mean,
        unit="nats per token",
        definition="The sum of the same k1 over all tokens, divided by the number of tokens.",
    ),
    Metric(
        name="kl/k3_per_token",
        reduction=Mean,
        unit="nats per token",
        definition="Mean over tokens of k3 = exp(-k1) - 1 + k1: never negative, and less noisy than k1.",
    ),
    Metric(
        name="kl/full_per_token",
        reduction=Mean,
        unit="nats per token",
        definition="The KL of the policy from the reference over the whole vocabulary, mean over the tokens of all "
        "updates: no estimate. Only with `kl.apply_to: loss` and `kl.estimator: full`.",
        better=Better.DOWN,
    ),
    Metric(
        name="kl/same_top_fraction",
        reduction=Mean,
        unit="fraction",
        definition="Fraction of the same tokens at whose position the most likely token of policy and reference is the "
        "same.",
        better=Better.UP,
    ),
    Metric(
        name="kl/coefficient",
        reduction=Last,
        unit="score per nat",
        definition="The cost of one nat of KL in this step. An adaptive coefficient changes after the step.",
    ),
    Metric(
        name="advantage/mean",
        reduction=Mean,
        unit="score",
        definition="Mean over tokens of the advantages, before standardising.",
    ),
    Metric(
        name="advantage/std",
        reduction=Deviation,
        unit="score",
        definition="Standard deviation over tokens of the advantages, before standardising.",
    ),
    Metric(
        name="advantage/flat",
        reduction=Last,
        unit="fraction",
        definition="1 if the returns of the step are nearly equal compared with those of the run "
        "(`ppo.advantage.least_spread`), so that all advantages are 0 and the policy is not updated; otherwise "
        "0. Only in runs with a value model.",
    ),
    Metric(
        name="group/rollouts",
        reduction=Last,
        unit="rollouts",
        definition="Rollouts of the step, each of `ppo.prompts_per_step` prompts, with `zero_variance_groups: "
        "resample`. At `resample_rounds` the step may lack groups to learn from.",
        better=Better.DOWN,
    ),
    Metric(
        name="group/effective_fraction",
        reduction=Mean,
        unit="fraction",
        definition="The effective sample fraction: fraction of the counted responses whose group has different task "
        "rewards (`ppo.task_reward`, before any shaping). The other responses teach nothing about the task. Only "
        "in runs with a group baseline.",
        better=Better.UP,
    ),
    Metric(
        name="group/zero_variance_fraction",
        reduction=Mean,
        unit="fraction",
        definition="Fraction of prompts whose responses all have the same task reward: all right, or all wrong. Only "
        "in runs with a group baseline.",
        better=Better.DOWN,
    ),
    Metric(
        name="group/zero_advantage_fraction",
        reduction=Mean,
        unit="fraction",
        definition="Fraction of prompts without any advantage: all their responses have the same return, with the "
        "KL, or `ppo.advantage.zero_variance_groups` excludes them. Only in runs with a group baseline.",
        better=Better.DOWN,
    ),
    Metric(
        name="value/explained_variance",
        reduction=Last,
        unit="fraction",
        definition="1 - Var(returns - values) / Var(returns) over the tokens of the step, with the values before the "
        "updates: 1 is a perfect critic, 0 a critic no better than a constant. Also 0 if all returns are equal.",
        better=Better.UP,
    ),
    Metric(
        name="extra/<component>",
        reduction=Last,
        unit="that of the call",
        definition="A number that a user-defined call wrote in this step (docs/dataflow.md).",
    ),
)
