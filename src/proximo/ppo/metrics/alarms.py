"""Alarm rules of PPO, causes before effects. The checks: score_checks.py, update_checks.py.

Thresholds prefer late alarms to false ones. Most checks stay silent if the run succeeds: high scores that no longer
differ are success.
"""

from functools import partial

from proximo.metrics.alarms import PROBLEM, RESTART, WARNING, Rule, counted
from proximo.metrics.shared_declarations import NO_UPDATE, NOT_FINITE, SKIPPED, no_update_rule, rate_rule
from proximo.ppo.metrics import score_checks as scores
from proximo.ppo.metrics import update_checks as updates

DESTROYED = "One step destroyed the policy"
DRIFTS = "The engine samples from another policy than the learner's"
NOISE = "The policy samples noise"
GREEDY = "Sampling is almost greedy"
CUT = "Nearly all answers are cut at the limit"
ONE_SCORE = "Every score is the same number"
OUTWEIGHS = "The KL penalty outweighs the score"
OUTPULLS = "The KL in the loss outweighs the advantages"
LEFT_OUT = "Most tokens are excluded from the updates"
TINY = "The policy hardly moves"
FLAT = "The score does not rise"
LONGER = "Longer answers score higher"
SHORTER = "Shorter answers score higher"
CLIPPED = "The clip fraction is high"
COLLAPSE = "Entropy collapses"
CRITIC = "The critic is no better than a constant"
GROUPS = "Most groups have zero variance"
GOLD = "The score rises while the gold score falls"

OF_LENGTH = (LONGER, SHORTER)
LEARNS_NOTHING = (TINY, FLAT, COLLAPSE, CRITIC, GROUPS)
"""Alarms that a lack of learning signal causes."""
CAUSED_BY_LARGE_MOVES = (CLIPPED, COLLAPSE, NO_UPDATE, SKIPPED, NOT_FINITE)
"""Alarms that a policy far from its start causes."""

PPO_RULES = (
    rate_rule((DESTROYED, CUT, OUTWEIGHS, OUTPULLS, *OF_LENGTH, *LEARNS_NOTHING, *CAUSED_BY_LARGE_MOVES)),
    Rule(DRIFTS, PROBLEM, updates.engine_drifts, explains=(CLIPPED, SKIPPED)).worded(
        when=f"mismatch/k3 is above {updates.MAX_MISMATCH} nats per token in the last fifth, or above "
        f"{updates.GROWING_MISMATCH} and {updates.MISMATCH_GROWTH} times that of the first fifth",
        advice="The updates take place on samples of another policy. Compare the precision, temperature and weights "
        "of the engine with the learner's; ppo.policy_loss.behaviour_weight corrects for what remains.",
    ),
    Rule(
        "Responses were unscored",
        WARNING,
        lambda run: counted(run, "Responses", "response/unscored", "evaluation/unscored"),
    ).worded(
        when="response/unscored or evaluation/unscored is above 0 in any step",
        advice="samples.jsonl has the reason (`reason`), for at least one response per step: a failing reward source, "
        "or an aborted generation. If one kind of answer always fails, the policy learns nothing about it.",
    ),
    Rule(LEFT_OUT, PROBLEM, updates.mostly_left_out, explains=(NO_UPDATE, *LEARNS_NOTHING)).worded(
        when="policy/rejected_fraction, or policy/behaviour_clip_fraction with masked weights, is above "
        f"{updates.MAX_EXCLUDED_SHARE} in the last fifth",
        advice=updates.LEFT_OUT_ADVICE,
    ),
    Rule(
        ONE_SCORE,
        PROBLEM,
        scores.all_scores_equal,
        explains=(NO_UPDATE, OUTWEIGHS, OUTPULLS, *LEARNS_NOTHING),
    ).worded(
        when="score/std is 0 in the first step and in nine of ten steps (five steps or more)",
        advice="There is nothing to learn from equal scores. Give the reward source a right and a wrong answer by "
        "hand. If it grades both correctly, the task is too hard or too easy for this policy: change the prompts, or "
        "fine-tune more. ppo.guards.max_constant_reward_steps stops such a run.",
    ),
    Rule(
        NOISE,
        PROBLEM,
        scores.samples_noise,
        explains=(DESTROYED, CUT, OUTWEIGHS, OUTPULLS, *OF_LENGTH, *LEARNS_NOTHING, *CAUSED_BY_LARGE_MOVES),
    ).worded(
        when="policy/entropy is above 4 nats per token in the first three steps",
        advice="At each token more than 50 tokens are about equally likely: ppo.rollout.temperature is too high, or "
        "the policy has the wrong weights.",
    ),
    Rule(
        GREEDY,
        PROBLEM,
        scores.samples_greedily,
        explains=(DESTROYED, OUTWEIGHS, OUTPULLS, *OF_LENGTH, *LEARNS_NOTHING, *CAUSED_BY_LARGE_MOVES),
    ).worded(
        when="policy/entropy is below 0.05 nats per token in the first three steps, and the score is not high",
        advice="With only one answer to each prompt the policy cannot find a better one: ppo.rollout.temperature is "
        "too low, or the model was fine-tuned for too long.",
    ),
    Rule(
        DESTROYED,
        PROBLEM,
        updates.destroyed,
        explains=(CUT, OUTWEIGHS, OUTPULLS, *OF_LENGTH, *LEARNS_NOTHING, *CAUSED_BY_LARGE_MOVES),
    ).worded(
        when="a step has a policy/clip_fraction above 0.3 and a policy/approx_kl above 0.1 nats, or a "
        "policy/approx_kl above 0.5; the mean score of the five steps after it is lower by a quarter of score/std "
        "than that of the five before, mostly in the first of these steps; and so is the mean of the last five steps "
        "of the run",
        advice=f"The step was too large: {RESTART}, with a tenth of the learning rate or less, or with fewer epochs. "
        "ppo.guards.target_kl ends the updates of such a step earlier.",
    ),
    Rule(GOLD, PROBLEM, scores.score_up_gold_down, trend=True, explains=(*OF_LENGTH, *CAUSED_BY_LARGE_MOVES)).worded(
        when="the gold score is below its best fifth by more than its noise, while the score is above its value in "
        "that fifth",
        advice="The policy exploits the reward model. Stop at the best gold score, raise the KL coefficient, or train "
        "the reward model on answers like these.",
    ),
    Rule(LONGER, WARNING, partial(scores.length_pays, sign=1), explains=(CUT, *CAUSED_BY_LARGE_MOVES)).worded(
        when=f"the correlation of length and score among the answers of a step is {scores.MAX_LENGTH_CORRELATION} or "
        "more, as the mean over the steps whose scores differ",
        advice="The reward may favour length. Compare answers of equal length in samples.jsonl, or remove the length "
        "from the score (docs/rewards.md).",
    ),
    Rule(SHORTER, WARNING, partial(scores.length_pays, sign=-1), explains=CAUSED_BY_LARGE_MOVES).worded(
        when=f"that correlation is -{scores.MAX_LENGTH_CORRELATION} or less",
        advice="The reward may favour short answers. Compare answers of equal length in samples.jsonl; if short "
        "answers say too little, set ppo.score.min_tokens.",
    ),
    Rule(CUT, WARNING, scores.all_cut_off, trend=True, explains=(NO_UPDATE, *LEARNS_NOTHING)).worded(
        when="response/finished_fraction is below 0.1 in the last fifth",
        advice="If answers in samples.jsonl stop midway, raise ppo.rollout.max_new_tokens. If they run on, the policy "
        "never generates the end token: fine-tuning must include it, and it must be the tokenizer's eos_token. "
        "Harmless if answers should have a fixed length.",
    ),
    no_update_rule(updates.no_update, explains=(TINY, FLAT, GROUPS)),
    Rule(OUTWEIGHS, PROBLEM, scores.kl_outweighs_score, explains=LEARNS_NOTHING).worded(
        when="in the last fifth the KL penalty of a response, or its noise, exceeds three times the sum of the "
        "largest standard deviation of the scores and their gain",
        advice="Lower ppo.kl.coefficient, or raise ppo.score.scale: the policy learns to stay at its start.",
    ),
    Rule(OUTPULLS, PROBLEM, updates.kl_outweighs_policy_loss, explains=LEARNS_NOTHING).worded(
        when="with ppo.kl.kind loss, kl/coefficient times the root of twice kl/k3_per_token exceeds the size of "
        "the advantages in the last fifth (1 if they are standardised, otherwise advantage/std), and the score is not "
        "high",
        advice="Lower ppo.kl.coefficient: the policy learns to stay at its start.",
    ),
    Rule(CLIPPED, WARNING, updates.clip_fraction_high, explains=(FLAT, COLLAPSE, CRITIC)).worded(
        when="policy/clip_fraction is above 0.3 in the last fifth (objective ppo)",
        advice="Updates are too large: lower the learning rate or the epochs per step, or use larger minibatches.",
    ),
    Rule(TINY, WARNING, updates.hardly_moves, trend=True, explains=(FLAT,)).worded(
        when="no token is clipped in any step and policy/approx_kl stays below 0.00001; with one update a step, where "
        "both are 0, kl/k3_per_token stays below it",
        advice="Raise ppo.policy_optimizer.learning_rate, and check that advantage/std is not 0.",
    ),
    Rule(CRITIC, WARNING, updates.critic_useless, trend=True).worded(
        when="value/explained_variance is at or below 0.01 in the last fifth of the steps whose scores differ, and "
        "the score is not high",
        advice="Raise the value model's learning rate, start it from the reward model, or let it train first "
        "(ppo.critic_warmup_steps).",
    ),
    Rule(COLLAPSE, WARNING, updates.entropy_collapses, trend=True, explains=(FLAT, GROUPS)).worded(
        when="policy/entropy in the last fifth is below a fifth of its value in the first, while the score is not "
        "high and no longer rises",
        advice="The policy gives nearly the same answer every time and has nothing left to learn from. Raise the KL "
        "coefficient, lower the learning rate, or set ppo.policy_loss.entropy_coefficient.",
    ),
    Rule(GROUPS, WARNING, scores.groups_dead, trend=True, explains=(FLAT,)).worded(
        when="group/zero_variance_fraction is above 0.5 in the last fifth, and the score is not high",
        advice="In these groups all answers are right, or all are wrong. Use prompts of medium difficulty (data.filter "
        "selects them), or more answers per prompt. "
        "`ppo.advantage.zero_variance_groups: exclude` removes these groups from the loss, `resample` replaces them.",
    ),
    Rule(FLAT, WARNING, scores.score_flat, trend=True).worded(
        when="score/mean in the last fifth is not above the first by more than its noise, and the score is not high "
        "(ten steps or more)",
        advice="Check whether answers to one prompt differ in score at all. Then check the clip fraction (at 0 raise "
        "the learning rate, above 0.3 lower it) and the KL coefficient.",
    ),
)
