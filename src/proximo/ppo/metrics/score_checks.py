"""What the rules for PPO look for in scores, lengths and groups. Not in updates: see update_checks."""

import math
from statistics import fmean

from proximo.metrics.alarms import Finding, fifth_noise, fifths
from proximo.metrics.formatting import format_number as number
from proximo.metrics.run_files import Run, Series, setting
from proximo.ppo.metrics.signs import ends, is_flat, one_score, rises, succeeds, where_scores_differ

MIN_STEPS = 10
"""Of which rules speak that compare two trends."""
PAYS_LENGTH = 0.7
"""The correlation of score and length from which the one may be paid for the other."""
OUTWEIGHS = 3
"""How many times what there was to gain a response may pay for its KL."""
NOISE_ENTROPY, GREEDY_ENTROPY = 4.0, 0.05
"""Nats per token: 55 equally likely tokens at each place, and one token that is 99% sure."""


def score_up_gold_down(run: Run) -> str | None:
    """The proxy goes on rising beyond the best of what it stands for."""
    for score_name, gold_name in (("score/mean", "gold/mean"), ("evaluation/score", "evaluation/gold")):
        score, gold = run.series(score_name), run.series(gold_name)
        scores, golds = fifths(score), fifths(gold)
        if scores is None or golds is None:
            continue
        peak = golds.index(max(golds))
        fall = golds[peak] - golds[-1]
        if fall > 5 * fifth_noise(gold) and fall > 0.05 * (max(golds) - min(golds)) and scores[-1] > scores[peak]:
            return f"Since its best fifth, the gold score fell from {number(golds[peak])} to {number(golds[-1])},"
    return None


def all_scores_equal(run: Run) -> str | None:
    """Nothing can be learned, and nothing ever could."""
    if not one_score(run):
        return None
    spread = run.series("score/std")
    return (
        f"All responses of a step scored {number(run.series('score/mean').values[-1])} in {spread.values.count(0)} "
        f"of {len(spread)} steps, including the first."
    )


def score_flat(run: Run) -> Finding | None:
    """Flat where it might rise: a score that is as high as it gets is no failure."""
    score = run.series("score/mean")
    means = fifths(score)
    if means is None or len(score) < MIN_STEPS or means[-1] - means[0] > 2 * fifth_noise(score) or succeeds(run):
        return None
    return Finding(
        f"It was {number(means[0])} in the first fifth and is {number(means[-1])} in the last.", _why_flat(run)
    )


def _why_flat(run: Run) -> str | None:
    clipped, moved = fifths(run.series("policy/clip_fraction")), fifths(run.series("policy/approx_kl"))
    if clipped is None or moved is None:
        return None
    if clipped[-1] > 0.3:
        return (
            f"{clipped[-1]:.0%} of tokens are clipped: lower ppo.policy_optimizer.learning_rate or ppo.epochs_per_step."
        )
    if max(clipped) < 0.001:
        return "Hardly any token is clipped: raise ppo.policy_optimizer.learning_rate."
    return (
        "The update size is not the cause. Check whether answers to one prompt differ in score at all, lower "
        "ppo.kl.coefficient, and grade some answers of samples.jsonl by hand."
    )


def kl_outweighs_score(run: Run) -> str | None:
    """The penalty of a response, or the noise in it, beside what scores differed by at most and what they gained.

    The sum of k1 over a response has a variance of about twice its mean where policy and reference are near each other
    (Schulman 2020), so a penalty whose mean is small can still drown the score.
    """
    coefficients, spreads = run.series("kl/coefficient"), run.series("score/shaped_std") or run.series("score/std")
    per_response = _products(run.series("kl/k3_per_token"), run.series("response/tokens_mean"))
    recent, means, widest = fifths(per_response), fifths(run.series("score/mean")), max(fifths(spreads) or (0.0,))
    if recent is None or means is None or not len(coefficients) or not widest or succeeds(run):
        return None
    if setting(run.config, "ppo", "kl", "apply_to") == "loss":  # it is weighed against advantages there, not scores
        return None
    # k3 is never negative but for rounding.
    coefficient, kl, gained = coefficients.values[-1], max(0.0, recent[-1]), max(0.0, means[-1] - means[0])
    if coefficient * max(kl, math.sqrt(2 * kl)) <= OUTWEIGHS * (widest + gained):
        return None
    mean, noise = coefficient * kl, coefficient * math.sqrt(2 * kl)
    return (
        f"The KL penalty of a response is {number(mean)} +/- {number(noise)}, at {number(coefficient)} per nat; "
        f"its score varies by {number(widest)} and rose by {number(gained)}."
    )


def _products(left: Series, right: Series) -> Series:
    """Of two metrics that the same steps have."""
    both = dict(zip(right.steps, right.values, strict=True))
    points = [(step, value * both[step]) for step, value in zip(left.steps, left.values, strict=True) if step in both]
    return Series(tuple(step for step, _ in points), tuple(value for _, value in points))


def samples_noise(run: Run) -> Finding | None:
    """No language model writes sense with so many choices at each token."""
    entropy = run.series("policy/entropy").values[:3]
    if len(entropy) < 3 or min(entropy) < NOISE_ENTROPY:
        return None
    temperature = setting(run.config, "ppo", "rollout", "temperature")
    said = "" if temperature is None else f" The temperature is {number(temperature)}."
    lower = temperature is not None and temperature > 1
    return Finding(
        f"{number(fmean(entropy))} nats per token in the first steps.{said}",
        "Set ppo.rollout.temperature to 1." if lower else None,
    )


def samples_greedily(run: Run) -> Finding | None:
    """From the start: a policy that has become sure is another matter."""
    entropy = run.series("policy/entropy").values[:3]
    if len(entropy) < 3 or max(entropy) > GREEDY_ENTROPY or succeeds(run):
        return None
    temperature = setting(run.config, "ppo", "rollout", "temperature")
    said = "" if temperature is None else f" The temperature is {number(temperature)}."
    higher = temperature is not None and temperature < 1
    return Finding(
        f"{number(fmean(entropy))} nats per token in the first steps.{said}",
        "Set ppo.rollout.temperature to 1." if higher else None,
    )


def all_cut_off(run: Run) -> Finding | None:
    """Hardly an answer ends by itself: never did, or no longer does."""
    means = fifths(run.series("response/finished_fraction"))
    if means is None or means[-1] >= 0.1:
        return None
    if means[0] >= 0.5:
        return Finding(
            f"{means[-1]:.0%} of answers end with a stop token; it was {means[0]:.0%} in the first fifth.",
            "The policy no longer ends its answers: use ppo.score.missing_eos_penalty to make cut answers worth "
            "less, or a larger ppo.kl.coefficient to stay closer to the fine-tuned model.",
        )
    return Finding(f"{means[-1]:.0%} of answers end with a stop token, and {means[0]:.0%} did in the first fifth.")


def longer_pays(run: Run) -> str | None:
    """Among the answers of one step, the longer ones score higher."""
    r = _length_correlation(run)
    return None if r is None or r < PAYS_LENGTH else _said_correlation(r)


def shorter_pays(run: Run) -> str | None:
    """Among the answers of one step, the shorter ones score higher."""
    r = _length_correlation(run)
    return None if r is None or r > -PAYS_LENGTH else _said_correlation(r)


def _length_correlation(run: Run) -> float | None:
    series = where_scores_differ(run, "score/length_correlation")
    return fmean(series.values) if len(series) >= 3 else None


def _said_correlation(r: float) -> str:
    return f"Among the answers of one step the correlation of length and score is {r:+.2f} (mean over the steps)."


def rises_with_length(run: Run) -> str | None:
    """Answers half as long again, and a better score."""
    found = _length_and_score(run)
    if found is None or found[1] < 1.5 * found[0]:
        return None
    return _said_trend(run, found)


def rises_with_shortness(run: Run) -> str | None:
    """Answers of half the length or less, and a better score."""
    found = _length_and_score(run)
    if found is None or found[1] > 0.5 * found[0]:
        return None
    return _said_trend(run, found)


def _length_and_score(run: Run) -> tuple[float, float] | None:
    """Tokens of the first and the last fifth, where the score rises and the outcome, if there is one, does not."""
    tokens, score, outcome = (
        run.series(name) for name in ("response/tokens_mean", "score/mean", "score/task_reward_mean")
    )
    if min(len(tokens), len(score)) < MIN_STEPS or not rises(score) or (len(outcome) and not is_flat(outcome)):
        return None
    return ends(tokens)


def _said_trend(run: Run, tokens: tuple[float, float]) -> str:
    low, high = ends(run.series("score/mean"))
    return f"From {number(tokens[0])} to {number(tokens[1])} tokens, with a score from {number(low)} to {number(high)}."


def groups_dead(run: Run) -> str | None:
    """Not where all are right: that is what training was for."""
    means = fifths(run.series("group/zero_variance_fraction"))
    return f"{means[-1]:.0%} of prompts in the last fifth." if means and means[-1] > 0.5 and not succeeds(run) else None


def form_saturates(run: Run) -> str | None:
    """Only where `ppo.task_reward` says which number is the task: of parts alone nobody can tell which is the form."""
    outcome = run.series("score/task_reward_mean")
    if len(outcome) < MIN_STEPS or not is_flat(outcome):
        return None
    for name in run.names:
        part = run.series(name)
        means = fifths(part) if name.startswith("score/") and name.count("/") == 2 else None
        if means is None or not rises(part):
            continue
        if abs(means[-1] - means[-2]) <= 0.1 * (means[-1] - means[0]):
            return (
                f"{name} rose from {number(means[0])} to {number(means[-1])} and has levelled off, while the task "
                f"reward was {number(ends(outcome)[0])} and is {number(ends(outcome)[1])}."
            )
    return None


def repeats_itself(run: Run) -> str | None:
    """Few different pairs of tokens: no fault where the answers that are right are few."""
    means = fifths(run.series("response/distinct_2"))
    if means is None or means[-1] >= 0.5 * means[0] or succeeds(run):
        return None
    return f"Distinct-2 fell from {number(means[0])} to {number(means[-1])}."


def in_circles(run: Run) -> str | None:
    """Within one answer: a fault whatever it scores."""
    means = fifths(run.series("response/repeat_4gram"))
    if means is None or means[-1] <= 0.3 or means[-1] <= 2 * means[0]:
        return None
    return (
        f"{means[-1]:.0%} of the 4-grams of a response occurred in it before; it was {means[0]:.0%} in the first fifth."
    )
