"""Helps the alarm checks of PPO: success, destructive steps, trends, and steps whose scores differ."""

from dataclasses import dataclass
from statistics import fmean

from proximo.metrics.alarms import fifth_noise, fifths
from proximo.metrics.run_files import Run, Series, setting

LARGE_CLIP_FRACTION, LARGE_KL = 0.3, 0.1
"""A step may be destructive if it exceeds both, or five times the second alone (nats per token)."""
COMPARED_STEPS = 5
"""Number of steps before and after a large step whose mean scores are compared."""
MIN_FALL = 0.25
"""Smallest fall of the score that counts, in standard deviations of the step's scores."""
IMMEDIATE_SHARE = 2 / 3
"""Share of the fall that must come with the next step. A slower decline is not the effect of a single step."""
SOLVED_SHARE = 0.9
MIN_SPREAD = 0.25
"""Scores of a step differ if their standard deviation exceeds this share of the largest fifth's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DestructiveStep:
    """A step with large updates after which the score fell and did not recover."""

    step: int
    clip_fraction: float
    movement: float
    """KL from the step's start after its updates, in nats per token."""
    kl: tuple[float, float] | None
    """KL from the reference in the step and in the next one, in nats; None in a run without a reference."""
    score: tuple[float, float]
    """Mean score before and after."""


def destructive_step(run: Run) -> DestructiveStep | None:
    """The first step with large updates after which the score fell for good.

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
            kl = [near["kl/sequence"] for near in lines[index : index + 2] if "kl/sequence" in near]
            return DestructiveStep(
                step=int(line["step"]),
                clip_fraction=clipped,
                movement=moved,
                kl=(kl[0], kl[1]) if len(kl) == 2 else None,
                score=(before, after),
            )
    return None


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


def rises(series: Series) -> bool:
    """Whether the mean of the last fifth is clearly above that of the first."""
    first, last = ends(series)
    return last - first > 5 * fifth_noise(series)


def is_flat(series: Series) -> bool:
    """Whether the mean of the last fifth does not exceed that of the first by more than noise."""
    first, last = ends(series)
    return last - first <= 2 * fifth_noise(series)


def ends(series: Series) -> tuple[float, float]:
    """Means of the first and the last fifth. The series must have at least five steps."""
    means = fifths(series)
    assert means is not None
    return means[0], means[-1]


def _points(series: Series) -> tuple[tuple[int, ...], tuple[float, ...]]:
    return series.steps, series.values
