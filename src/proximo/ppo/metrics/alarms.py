"""The rules by which alarms are raised about a PPO run, causes before effects. Not how they look: see the checks.

Thresholds are meant to be late rather than wrong. A rule that blames looks at the score: high and equal is success.
"""

from proximo.metrics.alarms import Rule, Severity, counted
from proximo.metrics.declared.rules import NOT_FINITE, SKIPPED
from proximo.ppo.metrics import score_checks as scores
from proximo.ppo.metrics import update_checks as updates

DESTROYED = "One step destroyed the policy"
DISAGREE = "The sampler and the learner disagree"
NOISE = "The policy samples noise"
GREEDY = "The policy samples hardly anything but its first choice"
CUT = "Nearly all answers are cut at the limit"
ONE_SCORE = "Every score is the same number"
OUTWEIGHS = "The KL penalty outweighs the score"
OUTPULLS = "The KL in the loss outweighs the advantages"
LEFT_OUT = "Most tokens are left out of the updates"
TINY = "The policy hardly moves"
FLAT = "The score does not rise"
LONGER = "Longer answers score higher"
SHORTER = "Shorter answers score higher"
LENGTHENS = "The score rises with the length of answers"
SHORTENS = "The score rises as answers get shorter"
KL_FAST = "KL rises fast"
KL_NEGATIVE = "KL is negative"
CLIPPED = "The clip fraction is high"
COLLAPSE = "Entropy collapses"
CRITIC = "The critic is no better than a constant"
GROUPS = "Most groups teach nothing"
REPEATS = "The policy repeats itself"
CIRCLES = "Answers go round in circles"
GOLD = "The score rises while the gold score falls"

OF_LENGTH = (LONGER, SHORTER, LENGTHENS, SHORTENS)
LEARNS_NOTHING = (TINY, FLAT, COLLAPSE, CRITIC, GROUPS)
"""What follows where no score teaches anything."""
IN_ITS_TRAIN = (KL_FAST, CLIPPED, COLLAPSE, REPEATS, CIRCLES, SKIPPED, NOT_FINITE)
"""What follows where a policy goes far from where it began."""

PPO_RULES = (
    Rule(
        title=DISAGREE,
        when="a step's first minibatch was beyond the limits of its check",
        advice="Before any update both are the same weights. Look for another precision, dropout, or sampling "
        "settings that change the distribution.",
        severity=Severity.PROBLEM,
        check=lambda run: counted(run, "First minibatches", "first_minibatch/limit_exceeded"),
        explains=(KL_NEGATIVE, CLIPPED, SKIPPED),
    ),
    Rule(
        title="Responses were left out",
        when="response/unscored or evaluation/unscored is above 0 anywhere",
        advice="samples.jsonl says why (`reason`), for at least one of each step: a reward source that fails, or an "
        "engine that gives up. If it is one kind of answer that fails, the policy learns nothing of that kind.",
        severity=Severity.WARNING,
        check=lambda run: counted(run, "Responses", "response/unscored", "evaluation/unscored"),
    ),
    Rule(
        title=LEFT_OUT,
        when=f"policy/rejected_fraction, or policy/behaviour_clip_fraction with masked weights, is above "
        f"{updates.MOST} in the last fifth",
        advice=updates.LEFT_OUT_ADVICE,
        severity=Severity.PROBLEM,
        check=updates.mostly_left_out,
        explains=LEARNS_NOTHING,
    ),
    Rule(
        title=NOISE,
        when="policy/entropy is above 4 nats per token in the first three steps",
        advice="At each token more than 50 are about equally likely: ppo.rollout.temperature is too high, or the "
        "policy's weights are not those that were meant.",
        severity=Severity.PROBLEM,
        check=scores.samples_noise,
        explains=(DESTROYED, CUT, ONE_SCORE, OUTWEIGHS, OUTPULLS, *OF_LENGTH, *LEARNS_NOTHING, *IN_ITS_TRAIN),
    ),
    Rule(
        title=GREEDY,
        when="policy/entropy is below 0.05 nats per token in the first three steps, and the score is not high",
        advice="With one answer to each prompt nothing better can be found: ppo.rollout.temperature is too low, or "
        "fine-tuning has gone too far.",
        severity=Severity.PROBLEM,
        check=scores.samples_greedily,
        explains=(DESTROYED, ONE_SCORE, OUTWEIGHS, OUTPULLS, *OF_LENGTH, *LEARNS_NOTHING, *IN_ITS_TRAIN),
    ),
    Rule(
        title=DESTROYED,
        when="after a step with a policy/clip_fraction above 0.3 and a policy/approx_kl above 0.1 nats, or one above "
        "0.5, the mean score of five steps is a quarter of score/std below that of the five before, most of the "
        "fall at once, and so are the last five of the run",
        advice="Start again from before that step with a tenth of the learning rate or less, or with fewer epochs; "
        "ppo.guards.target_kl ends a step before it goes so far.",
        severity=Severity.PROBLEM,
        check=updates.destroyed,
        explains=(CUT, ONE_SCORE, OUTWEIGHS, OUTPULLS, KL_NEGATIVE, *OF_LENGTH, *LEARNS_NOTHING, *IN_ITS_TRAIN),
    ),
    Rule(
        title=GOLD,
        when="gold is below its best fifth by more than its noise, with a score above that fifth's",
        advice="The policy exploits the reward model. Stop at the best gold score, raise the KL coefficient, or train "
        "the reward model on answers like these.",
        severity=Severity.PROBLEM,
        check=scores.score_up_gold_down,
        trend=True,
        explains=(*OF_LENGTH, *IN_ITS_TRAIN),
    ),
    Rule(
        title=LONGER,
        when=f"the correlation of length and score among the answers of a step is {scores.PAYS_LENGTH} or more, mean "
        "over the steps whose scores differ",
        advice="The reward may be paying for length. Compare answers of equal length in samples.jsonl, or take length "
        "out of the score (docs/rewards.md).",
        severity=Severity.WARNING,
        check=scores.longer_pays,
        explains=(LENGTHENS, CUT, *IN_ITS_TRAIN),
    ),
    Rule(
        title=SHORTER,
        when=f"that correlation is -{scores.PAYS_LENGTH} or less",
        advice="The reward may be paying for shortness. Compare answers of equal length in samples.jsonl; if short "
        "ones say too little, ppo.score.min_tokens makes them dear.",
        severity=Severity.WARNING,
        check=scores.shorter_pays,
        explains=(SHORTENS, *IN_ITS_TRAIN),
    ),
    Rule(
        title="Form is rewarded and the task is not solved",
        when="a part of the score rose by more than its noise and levelled off, while score/task_reward_mean is not "
        "above its first fifth by more than its noise (ten steps or more; needs ppo.task_reward)",
        advice="The policy has learned what the form pays, and stops there. Lower the weight of that part, pay it only "
        "where the answer is right, or start from a policy that solves some of the prompts.",
        severity=Severity.WARNING,
        check=scores.form_saturates,
        trend=True,
    ),
    Rule(
        title=LENGTHENS,
        when="response/tokens_mean is half as long again as in the first fifth and score/mean is above it by more "
        "than its noise, while score/task_reward_mean, where there is one, is not (ten steps or more)",
        advice="Read the samples: longer reasoning can be the reason, or padding that the reward pays for. Name the "
        "task with ppo.task_reward, and add a penalty of length (docs/rewards.md).",
        severity=Severity.WARNING,
        check=scores.rises_with_length,
        trend=True,
        explains=(CUT, REPEATS, CIRCLES),
    ),
    Rule(
        title=SHORTENS,
        when="the same with a response/tokens_mean of at most half of that in the first fifth",
        advice="Read the samples: rambling may have gone, or what the answers were for. Name the task with "
        "ppo.task_reward, and see whether ppo.score.min_tokens is needed.",
        severity=Severity.WARNING,
        check=scores.rises_with_shortness,
        trend=True,
        explains=(REPEATS, COLLAPSE),
    ),
    Rule(
        title=CUT,
        when="response/finished_fraction is below 0.1 in the last fifth",
        advice="Raise ppo.rollout.max_new_tokens if answers in samples.jsonl stop midway. If they run on, the policy "
        "never writes the token that should end them: its fine-tuning must have had it, and it must be the eos_token "
        "of the tokenizer. Harmless where answers are meant to have a fixed length.",
        severity=Severity.WARNING,
        check=scores.all_cut_off,
        trend=True,
        explains=(ONE_SCORE, CIRCLES, *LEARNS_NOTHING),
    ),
    Rule(
        title=ONE_SCORE,
        when="score/std is 0 in the first step and in nine of ten steps (five steps or more)",
        advice="Nothing can be learned from it. Give the reward source some answers by hand, a right one and a wrong "
        "one. If both are judged rightly, the task is too hard or too easy for this policy: other prompts, or more "
        "fine-tuning. ppo.guards.max_constant_reward_steps stops such a run.",
        severity=Severity.PROBLEM,
        check=scores.all_scores_equal,
        explains=(OUTWEIGHS, OUTPULLS, KL_NEGATIVE, *LEARNS_NOTHING),
    ),
    Rule(
        title=OUTWEIGHS,
        when="in the last fifth what a response pays for its KL, or the noise in that, is above three times "
        "the largest deviation of the scores and what they gained together",
        advice="Lower ppo.kl.coefficient, or raise ppo.score.scale: the policy learns to stay where it is.",
        severity=Severity.PROBLEM,
        check=scores.kl_outweighs_score,
        explains=LEARNS_NOTHING,
    ),
    Rule(
        title=OUTPULLS,
        when="with ppo.kl.apply_to loss, kl/coefficient times the root of twice kl/k3_per_token is above the size of "
        "the advantages in the last fifth (1 where they are standardised, else advantage/std), and the score is not "
        "high",
        advice="Lower ppo.kl.coefficient: the policy learns to stay where it is.",
        severity=Severity.PROBLEM,
        check=updates.kl_outweighs_policy_loss,
        explains=LEARNS_NOTHING,
    ),
    Rule(
        title=CLIPPED,
        when="policy/clip_fraction is above 0.3 in the last fifth (objective ppo)",
        advice="Updates are too large: lower the learning rate, the epochs per step, or take larger minibatches.",
        severity=Severity.WARNING,
        check=updates.clip_fraction_high,
        explains=(KL_FAST, FLAT, COLLAPSE, REPEATS, CRITIC),
    ),
    Rule(
        title=TINY,
        when="no token is ever clipped and policy/approx_kl stays below 0.00001",
        advice="Raise ppo.policy_optimizer.learning_rate, and check that advantage/std is not 0.",
        severity=Severity.WARNING,
        check=updates.hardly_moves,
        trend=True,
        explains=(FLAT,),
    ),
    Rule(
        title=CRITIC,
        when="value/explained_variance is at or below 0.01 in the last fifth of the steps whose scores differ, "
        "and the score is not high",
        advice="Raise the value model's learning rate, start it from the reward model, or let it train first "
        "(ppo.critic_warmup_steps).",
        severity=Severity.WARNING,
        check=updates.critic_useless,
        trend=True,
    ),
    Rule(
        title=KL_NEGATIVE,
        when="kl/sequence is below -0.5 nats in the last fifth",
        advice="A mean below 0 means that answers are not drawn from the distribution that scores them: look for "
        "top-k, top-p, min tokens, dropout, or a reference with other settings.",
        severity=Severity.PROBLEM,
        check=updates.kl_negative,
    ),
    Rule(
        title=KL_FAST,
        when="kl/sequence is above 5 nats in the last fifth, and more than twice the fifth before",
        advice="Lower the learning rate or the epochs per step, or raise the KL coefficient.",
        severity=Severity.WARNING,
        check=updates.kl_rises_fast,
        trend=True,
        explains=(COLLAPSE, REPEATS, CIRCLES),
    ),
    Rule(
        title=COLLAPSE,
        when="policy/entropy in the last fifth is below a fifth of what it was in the first, while the score is not "
        "high and no longer rises",
        advice="The policy nearly always says the same, and has nothing left to learn from. Raise the KL coefficient, "
        "lower the learning rate, or add ppo.policy_loss.entropy_coefficient.",
        severity=Severity.WARNING,
        check=updates.entropy_collapses,
        trend=True,
        explains=(FLAT, REPEATS, GROUPS),
    ),
    Rule(
        title=GROUPS,
        when="group/zero_variance_fraction is above 0.5 in the last fifth, and the score is not high",
        advice="All answers to a prompt are right, or all are wrong: take prompts of middling difficulty (`proximo "
        "pass-rate` measures it, data.filter chooses by it), or more answers each. "
        "`ppo.advantage.zero_variance_groups: exclude` keeps the others from being drowned.",
        severity=Severity.WARNING,
        check=scores.groups_dead,
        trend=True,
        explains=(FLAT,),
    ),
    Rule(
        title=CIRCLES,
        when="response/repeat_4gram is above 0.3 in the last fifth, and more than twice that of the first",
        advice="A phrase that is said again and again earns something, or nothing makes an answer end. Read the "
        "samples, add a penalty of repetition, or raise the KL coefficient.",
        severity=Severity.WARNING,
        check=scores.in_circles,
        trend=True,
        explains=(REPEATS,),
    ),
    Rule(
        title=REPEATS,
        when="response/distinct_2 in the last fifth is below half of what it was in the first, and the score is not "
        "high",
        advice="Read the samples. A score that a repeated phrase can raise needs a KL coefficient that makes it "
        "dear, or a better reward model.",
        severity=Severity.WARNING,
        check=scores.repeats_itself,
        trend=True,
    ),
    Rule(
        title=FLAT,
        when="the last fifth of score/mean is not above the first by more than its noise, and the score is not high "
        "(ten steps or more)",
        advice="See whether answers to one prompt differ in score at all, then look at the clip fraction (at 0 raise "
        "the learning rate, above 0.3 lower it), then at the KL coefficient.",
        severity=Severity.WARNING,
        check=scores.score_flat,
        trend=True,
    ),
)
