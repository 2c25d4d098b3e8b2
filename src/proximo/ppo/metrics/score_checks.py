"""Checks of PPO's alarms on scores, lengths and groups, and when a run counts as a success."""

import math
from collections.abc import Callable, Sequence
from statistics import fmean

from proximo.message_text import format_number as number
from proximo.metrics.alarms import Finding, fifth_noise, fifths
from proximo.metrics.run_files import Run, Series, setting

SOLVED_SHARE = 0.9
MIN_SPREAD = 0.25
"""Scores of a step differ if their standard deviation exceeds this share of the largest fifth's."""
MIN_STEPS = 10
"""Smallest number of steps for checks that compare two trends."""
MAX_LENGTH_CORRELATION = 0.7
"""Correlation of score and length from which the score may reward length itself."""
MAX_KL_TO_GAIN = 3
"""Largest allowed ratio of a response's KL penalty to the spread and rise of the score."""
NOISE_ENTROPY, GREEDY_ENTROPY = 4.0, 0.05
"""Entropy in nats per token: that of 55 equally likely tokens, and that of a token with probability 99%."""


def score_up_gold_down(run: Run) -> str | None:
    """Over-optimisation: the score still rises after the gold score has passed its maximum."""
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
    """All responses have had the same score since the first step, so there is no learning signal."""
    if not has_constant_scores(run):
        return None
    spread = run.series("score/std")
    return (
        f"All responses of a step scored {number(run.series('score/mean').values[-1])} in {spread.values.count(0)} "
        f"of {len(spread)} steps, including the first."
    )


def score_flat(run: Run) -> Finding | None:
    """The score does not rise although it is not saturated."""
    score = run.series("score/mean")
    means = fifths(score)
    if means is None or len(score) < MIN_STEPS or means[-1] - means[0] > 2 * fifth_noise(score) or succeeds(run):
        return None
    return Finding(
        f"It was {number(means[0])} in the first fifth and is {number(means[-1])} in the last.",
        _why_flat(run, falls=means[0] - means[-1] > 2 * fifth_noise(score)),
    )


def _why_flat(run: Run, *, falls: bool) -> str | None:
    clipped, moved = fifths(run.series("policy/clip_fraction")), fifths(run.series("policy/approx_kl"))
    if clipped is None or moved is None:
        return None
    if clipped[-1] > 0.3:
        return (
            f"{clipped[-1]:.0%} of tokens are clipped: lower ppo.policy_optimizer.learning_rate or ppo.epochs_per_step."
        )
    if falls:
        return (
            "It falls: the updates follow noise more than the score. Lower ppo.policy_optimizer.learning_rate, or take "
            "more responses a step. See in samples.jsonl whether answers to one prompt differ in score."
        )
    if max(clipped) < 0.001 and not has_one_update(run):
        return "Hardly any token is clipped: raise ppo.policy_optimizer.learning_rate."
    return (
        "The update size is not the cause. Check whether answers to one prompt differ in score at all, lower "
        "ppo.kl.coefficient, and grade some answers of samples.jsonl by hand."
    )


def kl_outweighs_score(run: Run) -> str | None:
    """The KL penalty of a response, or its noise, is large compared with the spread and the rise of the score.

    The sum of k1 over a response has a variance of about twice its mean if policy and reference are close (Schulman
    2020), so that even a penalty with a small mean can dominate the score.
    """
    coefficients, spreads = run.series("kl/coefficient"), run.series("score/shaped_std") or run.series("score/std")
    per_response = _products(run.series("kl/k3_per_token"), run.series("response/tokens_mean"))
    recent, means, widest = fifths(per_response), fifths(run.series("score/mean")), max(fifths(spreads) or (0.0,))
    if recent is None or means is None or not len(coefficients) or not widest or succeeds(run):
        return None
    if setting(run.config, "ppo", "kl", "kind") in ("loss", "margin"):  # there no score competes with it
        return None
    # Rounding can make k3 negative.
    coefficient, kl, gained = coefficients.values[-1], max(0.0, recent[-1]), max(0.0, means[-1] - means[0])
    if coefficient * max(kl, math.sqrt(2 * kl)) <= MAX_KL_TO_GAIN * (widest + gained):
        return None
    mean, noise = coefficient * kl, coefficient * math.sqrt(2 * kl)
    return (
        f"The KL penalty of a response is {number(mean)} +/- {number(noise)}, at {number(coefficient)} per nat; "
        f"its score varies by {number(widest)} and rose by {number(gained)}."
    )


def _products(left: Series, right: Series) -> Series:
    """Products of two metrics, at the steps that have both."""
    both = dict(zip(right.steps, right.values, strict=True))
    points = [(step, value * both[step]) for step, value in zip(left.steps, left.values, strict=True) if step in both]
    return Series(tuple(step for step, _ in points), tuple(value for _, value in points))


def samples_noise(run: Run) -> Finding | None:
    """The entropy of the first steps is too high for meaningful text."""
    entropy = run.series("policy/entropy").values[:3]
    if len(entropy) < 3 or min(entropy) < NOISE_ENTROPY:
        return None
    return _first_entropy(run, entropy, lambda temperature: temperature > 1)


def samples_greedily(run: Run) -> Finding | None:
    """Sampling is almost deterministic from the first steps on."""
    entropy = run.series("policy/entropy").values[:3]
    if len(entropy) < 3 or max(entropy) > GREEDY_ENTROPY or succeeds(run):
        return None
    return _first_entropy(run, entropy, lambda temperature: temperature < 1)


def _first_entropy(run: Run, entropy: Sequence[float], is_the_cause: Callable[[float], bool]) -> Finding:
    temperature = setting(run.config, "ppo", "rollout", "temperature")
    stated = "" if temperature is None else f" The temperature is {number(temperature)}."
    advice = "Set ppo.rollout.temperature to 1." if temperature is not None and is_the_cause(temperature) else None
    return Finding(f"{number(fmean(entropy))} nats per token in the first steps.{stated}", advice)


def all_cut_off(run: Run) -> Finding | None:
    """Hardly any response ends with a stop token, from the start or in the last fifth."""
    means = fifths(run.series("response/finished_fraction"))
    if means is None or means[-1] >= 0.1:
        return None
    if means[0] >= 0.25:
        return Finding(
            f"{means[-1]:.0%} of answers end with a stop token; it was {means[0]:.0%} in the first fifth.",
            "The policy no longer ends its answers: use ppo.score.missing_eos_penalty to make cut answers worth "
            "less, or a larger ppo.kl.coefficient to stay closer to the fine-tuned model.",
        )
    return Finding(f"{means[-1]:.0%} of answers end with a stop token, and {means[0]:.0%} did in the first fifth.")


def length_pays(run: Run, *, sign: int) -> str | None:
    """Within a step, longer responses score higher, or with a `sign` of -1 shorter ones."""
    series = where_scores_differ(run, "score/length_correlation")
    if len(series) < 3 or sign * fmean(series.values) < MAX_LENGTH_CORRELATION:
        return None
    r = fmean(series.values)
    return f"Among the answers of one step the correlation of length and score is {r:+.2f} (mean over the steps)."


def groups_dead(run: Run) -> str | None:
    """Most groups have zero variance, and not because the run has succeeded."""
    means = fifths(run.series("group/zero_variance_fraction"))
    return f"{means[-1]:.0%} of prompts in the last fifth." if means and means[-1] > 0.5 and not succeeds(run) else None


def has_one_update(run: Run) -> bool:
    """Whether a step of the run has one update. It is made where the ratio is 1, so that nothing can be clipped."""
    ppo = run.config, "ppo"
    if setting(*ppo, "epochs_per_step") != 1:
        return False
    of_update = setting(*ppo, "minibatch_responses")
    if of_update is None:
        return setting(*ppo, "num_minibatches") == 1
    sizes = [setting(*ppo, key) for key in ("prompts_per_step", "responses_per_prompt")]
    return None not in sizes and of_update == sizes[0] * sizes[1]


def succeeds(run: Run) -> bool:
    """Whether the run has a high score: near its maximum, and either saturated or far above its start.

    Saturated: nearly all responses of a step have the step's highest score, or the task reward nearly reaches
    `ppo.solved_score`. Far above: by more than the standard deviation of the scores in the first fifth.
    """
    score = run.series("score/mean")
    means, best = fifths(score), fifths(run.series("score/best_fraction"))
    if means is None:
        return False
    noise = 2 * fifth_noise(score)
    if means[-1] < max(means) - noise:
        return False
    rise = means[-1] - means[0]
    solved = setting(run.config, "ppo", "solved_score")
    task_reward = fifths(run.series("score/task_reward_mean")) or means
    if solved is not None and task_reward[-1] >= SOLVED_SHARE * solved > 0:
        return True
    if best is not None and best[-1] >= SOLVED_SHARE and (rise > noise or best[0] >= SOLVED_SHARE):
        return not has_constant_scores(run)
    spread = fifths(run.series("score/std"))
    return spread is not None and rise > max(noise, spread[0])


def has_constant_scores(run: Run) -> bool:
    """Whether all responses of a step had the same score in at least 90% of the steps, including the first."""
    spreads = run.series("score/std").values
    return len(spreads) >= 5 and spreads[0] == 0 and spreads.count(0) >= 0.9 * len(spreads)


def where_scores_differ(run: Run, name: str) -> Series:
    """The metric at the steps whose scores differ, compared with the fifth of the run where they differ most.

    Without differences in score, a critic has nothing to explain and length explains nothing.
    """
    series, spread = run.series(name), run.series("score/std")
    widest = max(fifths(spread) or (0.0,))
    wide = {step for step, value in zip(*_points(spread), strict=True) if value > MIN_SPREAD * widest}
    if not len(spread):
        return series
    kept = [(step, value) for step, value in zip(*_points(series), strict=True) if step in wide]
    return Series(tuple(step for step, _ in kept), tuple(value for _, value in kept))


def _points(series: Series) -> tuple[tuple[int, ...], tuple[float, ...]]:
    return series.steps, series.values
