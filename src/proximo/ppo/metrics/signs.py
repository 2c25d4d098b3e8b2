"""What several rules for PPO look for: success, the step that destroyed a policy, steps whose scores tell nothing."""

from dataclasses import dataclass
from statistics import fmean

from proximo.metrics.alarms import fifth_noise, fifths
from proximo.metrics.run_files import Run, Series, setting

VIOLENT_CLIPPING, VIOLENT_MOVEMENT = 0.3, 0.1
"""A step beyond both, or beyond five times the second alone (nats per token), may have destroyed the policy."""
STEPS_BESIDE = 5
"""Steps before and after a violent one whose scores are compared."""
FALL = 0.25
"""By how many standard deviations of the score it must fall."""
AT_ONCE = 2 / 3
"""The part of that fall that comes with the very next step; a slower decline is no single step's work."""
SOLVED_SHARE = 0.9
WIDE = 0.25
"""Scores of a step differ where their deviation is above this part of that of the widest fifth."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Blow:
    """One step after which the score was lower, and stayed so."""

    step: int
    clip_fraction: float
    movement: float
    """In nats per token, within the step."""
    kl: tuple[float, float] | None
    """From the reference, in the step and in the next one; None in a run without a reference."""
    score: tuple[float, float]
    """Before and after."""


def blow(run: Run) -> Blow | None:
    """The first step whose updates were violent and after which the score fell for good.

    A step samples before it learns: what its updates did shows in the scores of the next one.
    """
    lines = [line for line in run.lines if "score/mean" in line]
    scores = [line["score/mean"] for line in lines]
    for place, line in enumerate(lines[:-2]):
        clipped, moved = line.get("policy/clip_fraction", 0.0), line.get("policy/approx_kl", 0.0)
        if moved < VIOLENT_MOVEMENT or (clipped < VIOLENT_CLIPPING and moved < 5 * VIOLENT_MOVEMENT):
            continue
        before = fmean(scores[max(0, place + 1 - STEPS_BESIDE) : place + 1])
        after = fmean(scores[place + 1 : place + 1 + STEPS_BESIDE])
        limit = before - FALL * line.get("score/std", 0.0)
        at_once = scores[place] - scores[place + 1] >= AT_ONCE * (before - after)
        if at_once and max(scores[place + 1], after, fmean(scores[-STEPS_BESIDE:])) < limit:
            kl = [each["kl/sequence"] for each in lines[place : place + 2] if "kl/sequence" in each]
            return Blow(
                step=int(line["step"]),
                clip_fraction=clipped,
                movement=moved,
                kl=(kl[0], kl[1]) if len(kl) == 2 else None,
                score=(before, after),
            )
    return None


def succeeds(run: Run) -> bool:
    """Whether the score is high: near its best, and as good as it gets or far above its start.

    As good as it gets: nearly all responses of a step have its highest score, or `ppo.solved_score`. Far above: by more
    than the scores of the first fifth differed among themselves.
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
    outcome = fifths(run.series("score/task_reward_mean")) or means
    if solved is not None and outcome[-1] >= SOLVED_SHARE * solved > 0:
        return True
    if best is not None and best[-1] >= SOLVED_SHARE and (rise > noise or best[0] >= SOLVED_SHARE):
        return not one_score(run)
    spread = fifths(run.series("score/std"))
    return spread is not None and rise > max(noise, spread[0])


def one_score(run: Run) -> bool:
    """Whether at least nine of ten steps, the first among them, had one and the same score for all responses."""
    spreads = run.series("score/std").values
    return len(spreads) >= 5 and spreads[0] == 0 and spreads.count(0) >= 0.9 * len(spreads)


def where_scores_differ(run: Run, name: str) -> Series:
    """The metric in the steps whose scores differ at all, measured by the widest fifth of the run.

    Where they do not, there is nothing that a critic could know, nor anything that length could explain.
    """
    series, spread = run.series(name), run.series("score/std")
    widest = max(fifths(spread) or (0.0,))
    wide = {step for step, value in zip(*_points(spread), strict=True) if value > WIDE * widest}
    if not len(spread):
        return series
    kept = [(step, value) for step, value in zip(*_points(series), strict=True) if step in wide]
    return Series(tuple(step for step, _ in kept), tuple(value for _, value in kept))


def rises(series: Series) -> bool:
    """Whether the last fifth is clearly above the first."""
    first, last = ends(series)
    return last - first > 5 * fifth_noise(series)


def is_flat(series: Series) -> bool:
    """Whether the last fifth is not above the first by more than their noise."""
    first, last = ends(series)
    return last - first <= 2 * fifth_noise(series)


def ends(series: Series) -> tuple[float, float]:
    """The means of the first and the last fifth, of five steps or more."""
    means = fifths(series)
    assert means is not None
    return means[0], means[-1]


def _points(series: Series) -> tuple[tuple[int, ...], tuple[float, ...]]:
    return series.steps, series.values
