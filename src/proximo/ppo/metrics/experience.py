"""The metrics of a PPO step before its updates: rollout, scores, experience. Not those of other trainers.

Means over tokens count the tokens of the response mask and nothing else: no prompt, no padding, no response that an
infrastructure fault took out.
"""

from proximo.metrics.definitions import Better, Metric
from proximo.metrics.values import Deviation, Last, Max, Mean, Sum

ROLLOUT = (
    Metric(
        name="response/tokens_mean",
        reduction=Mean,
        unit="tokens",
        definition="Mean number of tokens of a response, its end-of-sequence token included.",
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
        definition="Share of responses that the policy ended itself (`eos` or `stop`); the rest were cut at the limit.",
        better=Better.UP,
    ),
    Metric(
        name="response/repeat_4gram",
        reduction=Mean,
        unit="fraction",
        definition="Mean over responses of the share of their runs of 4 neighbouring tokens that stood in the same "
        "response before. Near 1 for a response that goes round in a circle.",
        better=Better.DOWN,
    ),
    Metric(
        name="response/distinct_2",
        reduction=Last,
        unit="fraction",
        definition="Different pairs of neighbouring tokens over all such pairs, in all responses of the step together. "
        "It falls when the policy repeats itself. Compare it only between steps with as many tokens.",
    ),
    Metric(
        name="response/unscored",
        reduction=Sum,
        unit="responses",
        definition="Responses left out of loss, baseline and statistics, because the engine gave up on them or a "
        "reward source failed for a reason that is not theirs.",
        better=Better.DOWN,
    ),
    Metric(
        name="response/sampled",
        reduction=Sum,
        unit="responses",
        definition="Responses sampled in the step, of which the best were learned from; all other metrics of "
        "responses, scores and rewards are those of the best. Only with `ppo.samples_per_prompt`.",
    ),
    Metric(
        name="response/sampled_unscored",
        reduction=Sum,
        unit="responses",
        definition="How many of all that were sampled have no score for a reason that is not theirs. Only with "
        "`ppo.samples_per_prompt`.",
        better=Better.DOWN,
    ),
)

SCORE = (
    Metric(
        name="score/mean",
        reduction=Mean,
        unit="score",
        definition="Mean over responses of the score as the reward sources gave it, before anything that `ppo.score` "
        "does to it and before any KL penalty.",
        better=Better.UP,
    ),
    Metric(
        name="score/std",
        reduction=Deviation,
        unit="score",
        definition="Standard deviation over responses of that score (divided by their number).",
    ),
    Metric(
        name="score/best_fraction",
        reduction=Mean,
        unit="fraction",
        definition="Share of responses whose score is the highest of the step. Near 1 there is little left to learn.",
        better=Better.UP,
    ),
    Metric(
        name="score/length_correlation",
        reduction=Last,
        unit="fraction",
        definition="Pearson's correlation over responses of that score with their number of tokens: -1 where every "
        "token costs the same, 1 where every token pays. Absent where all scores or all lengths are equal.",
    ),
    Metric(
        name="score/sampled_mean",
        reduction=Mean,
        unit="score",
        definition="Mean score of all that was sampled: what the policy earns without the choice of the best. Only "
        "with `ppo.samples_per_prompt`.",
        better=Better.UP,
    ),
    Metric(
        name="score/sampled_std",
        reduction=Deviation,
        unit="score",
        definition="Standard deviation of those scores (divided by their number).",
    ),
    Metric(
        name="score/<component>/mean",
        reduction=Mean,
        unit="score",
        definition="Mean over responses of one named part of the score.",
        better=Better.UP,
    ),
    Metric(
        name="score/task_reward_mean",
        reduction=Mean,
        unit="score",
        definition="Mean over responses of the component that `ppo.task_reward` names, as its source gave it: how much "
        "of the task was solved. Only with `ppo.task_reward`.",
        better=Better.UP,
    ),
    Metric(
        name="score/shaped_mean",
        reduction=Mean,
        unit="score",
        definition="Mean over the responses that count and have a score of what they are rewarded with: the score "
        "after everything that `ppo.score` does to it, before any KL penalty. Only where it does something.",
    ),
    Metric(
        name="score/shaped_std",
        reduction=Deviation,
        unit="score",
        definition="Standard deviation over the same responses of that number.",
    ),
    Metric(
        name="score/penalised_fraction",
        reduction=Mean,
        unit="fraction",
        definition="Share of the same responses that a penalty of `ppo.score` took something from. Only where there is "
        "one.",
        better=Better.DOWN,
    ),
    Metric(
        name="score/answer_mean",
        reduction=Mean,
        unit="score",
        definition="Mean over the prompts of the step of the score of the answers that responses are compared with: "
        "reference answers with `ppo.score.minus_reference_answer`, greedy ones with the advantages `greedy_baseline`.",
    ),
    Metric(
        name="score/running_mean",
        reduction=Last,
        unit="score",
        definition="Mean of all scores of the run so far, this step's included, after baseline, bias and scale. Only "
        "with `ppo.score.normalise`.",
    ),
    Metric(
        name="score/running_std",
        reduction=Last,
        unit="score",
        definition="Standard deviation of the same scores (divided by their number minus 1), by which this step's were "
        "divided; 0 while they have no spread, and nothing is divided.",
    ),
    Metric(
        name="gold/mean",
        reduction=Mean,
        unit="score",
        definition="Mean over responses of the held-out gold source, which the policy is never trained on. "
        "Only in runs that have one.",
        better=Better.UP,
    ),
)

EXPERIENCE = (
    Metric(
        name="reward/std",
        reduction=Last,
        unit="score",
        definition="Standard deviation over responses of what each earned in all, discounted by `ppo.advantage.gamma`: "
        "the score, as shaped, minus the KL penalty, before any whitening.",
    ),
    Metric(
        name="reward/mean",
        reduction=Mean,
        unit="score",
        definition="Mean over responses of the sum of the rewards of their tokens: the score, as shaped, minus the KL "
        "penalty; whitened where `ppo.score.whiten_rewards` is on.",
        better=Better.UP,
    ),
    Metric(
        name="kl/sequence",
        reduction=Mean,
        unit="nats",
        definition="Mean over responses of the sum over tokens of k1 = log policy - log reference: an unbiased "
        "estimate of KL(policy || reference) of whole answers.",
    ),
    Metric(
        name="kl/per_token",
        reduction=Mean,
        unit="nats per token",
        definition="The same k1 summed over all tokens, over the number of tokens.",
    ),
    Metric(
        name="kl/k3_per_token",
        reduction=Mean,
        unit="nats per token",
        definition="Mean over tokens of k3 = exp(-k1) - 1 + k1: never negative, with less noise than k1.",
    ),
    Metric(
        name="kl/coefficient",
        reduction=Last,
        unit="score per nat",
        definition="What one nat of KL cost in this step. An adaptive coefficient moves after the step.",
    ),
    Metric(
        name="advantage/mean",
        reduction=Mean,
        unit="score",
        definition="Mean over tokens of the advantages, before they are standardised.",
    ),
    Metric(
        name="advantage/std",
        reduction=Deviation,
        unit="score",
        definition="Standard deviation over tokens of the advantages, before they are standardised.",
    ),
    Metric(
        name="advantage/flat",
        reduction=Last,
        unit="fraction",
        definition="1 where the returns of the step were all (nearly) one number beside those of the run "
        "(`ppo.advantage.least_spread`), so that all advantages are 0 and the policy learns nothing of them; else 0. "
        "Only in runs with a value model.",
    ),
    Metric(
        name="group/effective_fraction",
        reduction=Mean,
        unit="fraction",
        definition="The effective sample fraction: share of the responses that count whose group has different "
        "task rewards (`ppo.task_reward`, before any shaping). The others teach nothing about the task. Only in runs "
        "with a group baseline.",
        better=Better.UP,
    ),
    Metric(
        name="group/zero_variance_fraction",
        reduction=Mean,
        unit="fraction",
        definition="Share of prompts all of whose responses have the same task reward: all right, or all wrong. Only "
        "in runs with a group baseline.",
        better=Better.DOWN,
    ),
    Metric(
        name="group/zero_advantage_fraction",
        reduction=Mean,
        unit="fraction",
        definition="Share of prompts all of whose responses have the same return, KL included, and so no advantage, or "
        "that are left out by `ppo.advantage.zero_variance_groups`: they change nothing. Only in runs with a group "
        "baseline.",
        better=Better.DOWN,
    ),
    Metric(
        name="value/explained_variance",
        reduction=Last,
        unit="fraction",
        definition="1 - Var(returns - values) / Var(returns) over the tokens of the step, with the values of the "
        "rollout: 1 is a perfect critic, 0 one no better than a constant. It is 0, too, where all returns are equal.",
        better=Better.UP,
    ),
    Metric(
        name="extra/<component>",
        reduction=Last,
        unit="that of the call",
        definition="A number that a call of the caller's own wrote in this step (docs/dataflow.md).",
    ),
)
