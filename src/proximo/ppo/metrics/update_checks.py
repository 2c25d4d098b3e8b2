"""Checks of PPO's alarms on policy updates, critic and KL. Checks on scores: score_checks.py."""

import math
from collections.abc import Callable, Mapping
from statistics import fmean

from proximo.message_text import format_number as number
from proximo.metrics.alarms import RESTART, Finding, fifth_noise, fifths
from proximo.metrics.run_files import Run, setting
from proximo.metrics.shared_declarations import SKIPPED_CAUSE, idle_lines, no_update_detail
from proximo.ppo.metrics.score_checks import has_one_update, succeeds, where_scores_differ

LARGE_CLIP_FRACTION, LARGE_KL = 0.3, 0.1
"""A step may be destructive if it exceeds both, or five times the second alone (nats per token)."""
COMPARED_STEPS = 5
"""Number of steps before and after a large step whose mean scores are compared."""
MIN_FALL = 0.25
"""Smallest fall of the score that counts, in standard deviations of the step's scores."""
IMMEDIATE_SHARE = 2 / 3
"""Share of the fall that must come with the next step. A slower decline is not the effect of a single step."""
USELESS_VARIANCE = 0.01
SMALL_MOVE = 1e-5
"""KL in nats per token below which the policy hardly moves."""
MANY_EPOCHS = 4
MAX_EXCLUDED_SHARE = 0.5
"""Share of excluded tokens above which the alarm is raised."""
MAX_KL_TO_ADVANTAGE = 1
"""Largest allowed ratio of a token's KL gradient factor to the size of its advantage."""
MAX_MISMATCH = 0.1
"""KL of engine and learner in nats per token that no rounding explains."""
GROWING_MISMATCH = 0.01
MISMATCH_GROWTH = 5
DIVERGED_LOSS_RATIO = 10
"""A critic has diverged if its loss exceeds this many times the largest variance of the scores."""

LEFT_OUT_ADVICE = (
    "The policy does not learn from excluded tokens. The sampler differs too much from the policy: check for "
    "another precision, older weights, or sampling settings that change the distribution. If the difference is "
    "only rounding, raise the limit."
)


def destructive_step(run: Run) -> tuple[Mapping[str, float], Mapping[str, float], tuple[float, float]] | None:
    """The first step with large updates after which the score fell for good: its line, the next one, and the mean
    scores before and after.

    A step samples before it updates, so the effect of its updates shows in the scores of the next step.
    """
    lines = [line for line in run.lines if "score/mean" in line]
    scores = [line["score/mean"] for line in lines]
    for index, line in enumerate(lines[:-2]):
        clipped, moved = line.get("policy/clip_fraction", 0.0), line.get("policy/approx_kl", 0.0)
        if moved < LARGE_KL or (clipped < LARGE_CLIP_FRACTION and moved < 5 * LARGE_KL):
            continue
        before = fmean(scores[max(0, index + 1 - COMPARED_STEPS) : index + 1])
        after = fmean(scores[index + 1 : index + 1 + COMPARED_STEPS])
        limit = before - MIN_FALL * line.get("score/std", 0.0)
        is_immediate = scores[index] - scores[index + 1] >= IMMEDIATE_SHARE * (before - after)
        if is_immediate and max(scores[index + 1], after, fmean(scores[-COMPARED_STEPS:])) < limit:
            return line, lines[index + 1], (before, after)
    return None


def destroyed(run: Run) -> Finding | None:
    """A destructive step with its figures, and advice on the settings that caused it."""
    found = destructive_step(run)
    if found is None:
        return None
    line, following, (before, after) = found
    kl, kl_after = line.get("kl/sequence"), following.get("kl/sequence")
    moved = (
        ""
        if kl is None or kl_after is None
        else f", and the KL from the reference went from {number(kl)} to {number(kl_after)} nats"
    )
    clipped, movement = line.get("policy/clip_fraction", 0.0), line.get("policy/approx_kl", 0.0)
    detail = (
        f"Step {int(line['step'])}: {clipped:.0%} of tokens were clipped, the policy moved by {number(movement)} nats "
        f"per token{moved}. The score fell from {number(before)} to {number(after)} and did not recover."
    )
    rate, epochs = (
        setting(run.config, "ppo", *keys) for keys in (("policy_optimizer", "learning_rate"), ("epochs_per_step",))
    )
    if rate is None or epochs is None:
        return Finding(detail)
    many = f", or ppo.epochs_per_step, now {epochs}" if epochs > MANY_EPOCHS else ""
    return Finding(
        detail,
        f"The step was too large: {RESTART}, with a tenth of ppo.policy_optimizer.learning_rate or less, now "
        f"{rate:g}{many}. ppo.guards.target_kl ends the updates of such a step earlier.",
    )


def clip_fraction_high(run: Run) -> Finding | None:
    """A high share of clipped tokens. Only for objective ppo, since other objectives clip many tokens by design."""
    if setting(run.config, "ppo", "policy_loss", "objective", "kind") not in (None, "ppo"):
        return None
    means = fifths(run.series("policy/clip_fraction"))
    if means is None or means[-1] <= 0.3:
        return None
    epochs = setting(run.config, "ppo", "epochs_per_step") or 0
    advice = f"Lower ppo.epochs_per_step, now {epochs}." if epochs > MANY_EPOCHS else None
    return Finding(f"{means[-1]:.0%} of tokens are clipped in the last fifth.", advice)


def hardly_moves(run: Run) -> str | None:
    """No token was clipped and the policy moved very little in any step.

    With one update a step, both figures are 0 by definition. Then the movement away from the reference is judged.
    """
    if has_one_update(run):
        far = fifths(run.series("kl/k3_per_token"))
        if far is None or max(far) > SMALL_MOVE or succeeds(run):
            return None
        return f"The policy is at most {number(max(far))} nats per token from the reference."
    clipped, moved = fifths(run.series("policy/clip_fraction")), fifths(run.series("policy/approx_kl"))
    if clipped is None or moved is None or max(clipped) > 0 or max(moved) > SMALL_MOVE or succeeds(run):
        return None
    return f"No token was ever clipped, and a step changes its log-prob by at most {number(max(moved))} nats."


def mostly_left_out(run: Run) -> Finding | None:
    """Most tokens are rejected, or have behaviour weight 0 because they are out of bounds; with the bound that most of
    these are beyond."""
    loss = ("ppo", "policy_loss")
    masked = setting(run.config, *loss, "behaviour_weight", "kind") == "masked"
    upper = "upper" if setting(run.config, *loss, "rejection", "kind") == "ratio" else "limit"
    for metric, below, keys, holds in (
        ("rejected", "rejected_below", ("rejection.lower", f"rejection.{upper}"), True),
        ("behaviour_clip", "behaviour_below", ("behaviour_weight.floor", "behaviour_weight.cap"), masked),
    ):
        means = fifths(run.series(f"policy/{metric}_fraction"))
        if means is None or means[-1] <= MAX_EXCLUDED_SHARE or not holds:
            continue
        means_below = fifths(run.series(f"policy/{below}_fraction"))
        key = keys[means_below is None or means_below[-1] <= means[-1] / 2]
        bound = setting(run.config, *loss, *key.split("."))
        advice = None if bound is None else f"{'.'.join((*loss, key))} is {bound:g}. {LEFT_OUT_ADVICE}"
        return Finding(f"{means[-1]:.0%} of the counted tokens in the last fifth.", advice)
    return None


def kl_outweighs_policy_loss(run: Run) -> str | None:
    """With the KL in the loss: its gradient on a token exceeds that of the token's advantage.

    Both are factors of the gradient of the token's log-prob. The factor of the KL is the log-ratio to the
    reference (of k2 and full exactly), whose root mean square is about sqrt(2 * k3) if policy and reference are close.
    """
    coefficients, k3 = run.series("kl/coefficient"), run.series("kl/k3_per_token")
    means, size = fifths(k3), _size_of_advantages(run)
    if setting(run.config, "ppo", "kl", "kind") != "loss" or means is None or not len(coefficients) or not size:
        return None
    if not len(run.series("score/mean")):  # without a reward the KL is all there is to learn
        return None
    ratio = math.sqrt(2 * max(0.0, means[-1]))  # rounding can make k3 negative
    pull = coefficients.values[-1] * ratio
    if pull <= MAX_KL_TO_ADVANTAGE * size or succeeds(run):
        return None
    return (
        f"The log-ratio of a token to the reference is about {number(ratio)} nats, which gives the KL a weight of "
        f"{number(pull)} at a coefficient of {number(coefficients.values[-1])}; the weight of its advantage is "
        f"{number(size)}."
    )


def _size_of_advantages(run: Run) -> float | None:
    """Typical size of an advantage: 1 if standardised over the step, else the standard deviation in the last fifth."""
    if setting(run.config, "ppo", "advantage", "standardise"):
        return 1.0
    means = fifths(run.series("advantage/std"))
    return means[-1] if means else None


def entropy_collapses(run: Run) -> str | None:
    """Entropy fell to less than a fifth while the score is not high and no longer rises."""
    entropy, score = fifths(run.series("policy/entropy")), run.series("score/mean")
    if entropy is None or entropy[0] <= 0 or entropy[-1] >= 0.2 * entropy[0] or succeeds(run):
        return None
    scores = fifths(score)
    if scores is not None and scores[-1] - scores[-2] > fifth_noise(score):
        return None
    return f"From {number(entropy[0])} to {number(entropy[-1])} nats per token."


def critic_useless(run: Run) -> Finding | None:
    """The critic explains no variance, in steps whose scores differ, of a run that does not succeed anyway."""
    means = fifths(where_scores_differ(run, "value/explained_variance"))
    if means is None or means[-1] > USELESS_VARIANCE or succeeds(run):
        return None
    return Finding(f"The explained variance is {number(means[-1])} in the last fifth.", _divergence_advice(run))


def _divergence_advice(run: Run) -> str | None:
    loss, spread = run.series("value/loss"), run.series("score/std")
    if not len(loss) or not len(spread) or setting(run.config, "ppo", "value_loss", "normalise"):
        return None
    highest, widest = max(loss.values), max(spread.values) ** 2
    if highest <= DIVERGED_LOSS_RATIO * widest:
        return None
    step = loss.steps[loss.values.index(highest)]
    return (
        f"Its loss was {number(highest)} at step {step}, but the variance of the scores was never above "
        f"{number(widest)}: lower ppo.value_optimizer.learning_rate."
    )


def engine_drifts(run: Run) -> str | None:
    """Whether the log-probs of the engine are far from the learner's, or further than at the start."""
    means = fifths(run.series("mismatch/k3"))
    if means is None:
        return None
    first, last = means[0], means[-1]
    if last > MAX_MISMATCH or (last > GROWING_MISMATCH and last > MISMATCH_GROWTH * first):
        return f"mismatch/k3 is {number(last)} nats per token in the last fifth and {number(first)} in the first."
    return None


Line = Mapping[str, float]


def no_update(run: Run) -> str | None:
    """The last steps without an update, with their cause.

    Steps of the critic's warm-up are to take none. A run that succeeds may end with steps that have nothing to teach,
    but not consist of them.
    """
    first_step = 1 + (setting(run.config, "ppo", "critic_warmup_steps") or 0)
    idle = idle_lines(run, first_step=first_step)
    if not idle or (idle[-1]["progress/updates"] > 0 and succeeds(run)):
        return None
    return no_update_detail(run, idle, _causes(run))


def _causes(run: Run) -> dict[str, Callable[[Line], bool]]:
    task_reward = setting(run.config, "ppo", "task_reward")
    compared = f"{task_reward} (ppo.task_reward)" if task_reward else "the score"
    masks = setting(run.config, "ppo", "truncation", "kind") == "mask"
    return {
        "no response was scored": lambda line: line.get("response/unscored", 0) > 0 and "score/mean" not in line,
        **SKIPPED_CAUSE,
        "ppo.guards.target_kl ended the step before its first update": lambda line: (
            line.get("policy/stopped_updates", 0) > 0
        ),
        f"all groups were excluded, because in each of them {compared} is the same number "
        "(ppo.advantage.zero_variance_groups)": lambda line: line.get("group/effective_fraction") == 0,
        "all returns were nearly one number (ppo.advantage.least_spread)": lambda line: (
            line.get("advantage/flat", 0) > 0
        ),
        "all tokens were rejected (ppo.policy_loss.rejection)": lambda line: line.get("policy/rejected_fraction") == 1,
        "all responses were cut at the limit, which leaves them out (ppo.truncation: mask)": lambda line: (
            masks and line.get("response/finished_fraction") == 0
        ),
        "no response had a token": lambda line: line.get("response/tokens_max") == 0,
    }
