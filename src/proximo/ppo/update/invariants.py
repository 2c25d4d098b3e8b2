"""Checks during a run that the learner's log-probs equal the sampler's before the first update of a step."""

import warnings

from proximo.algorithms.losses import PolicyStatistics
from proximo.config.ppo.objectives import ObjectiveConfig, PPOObjectiveConfig
from proximo.errors import TrainingError
from proximo.records import Experience

DEFAULT = PPOObjectiveConfig()
FIRST_MINIBATCH_LIMITS = {
    "float32": {"max_abs_log_ratio": 1e-3, "mean_abs_log_ratio": 1e-5},
    "tf32": {"mean_abs_log_ratio": 0.005, "clip_fraction": 0.01},
    "bf16": {"mean_abs_log_ratio": 0.02, "clip_fraction": 0.01},
    "bf16_float32_head": {"mean_abs_log_ratio": 0.02, "clip_fraction": 0.01},
}
"""Precision -> limits of the first minibatch, where the ratio is 1 up to rounding. Exceeding one is a
warning; exceeding it tenfold stops the run."""
UNKNOWN_CAUSES = (
    "likely causes are a model with dropout or state, weights changed from outside, or responses of another model"
)


def broken_limits(
    statistics: PolicyStatistics, *, precision: str, objective: ObjectiveConfig = DEFAULT
) -> list[tuple[str, float, float]]:
    """(name, value, limit) of every limit that the first minibatch exceeds.

    The clip fraction is not checked for an objective whose clip range is narrower than rounding errors in bf16.
    """
    count = statistics.num_tokens.item()
    if not count:
        return []
    measured = {
        "max_abs_log_ratio": statistics.max_abs_log_ratio.item(),
        "mean_abs_log_ratio": statistics.abs_log_ratio.item() / count,
        "clip_fraction": statistics.clipped.item() / count,
    }
    limits = dict(FIRST_MINIBATCH_LIMITS[precision])
    if not objective.clip_is_wider_than_rounding:
        limits.pop("clip_fraction", None)
    # Negated, so that NaN counts as exceeding the limit.
    return [(name, measured[name], limit) for name, limit in limits.items() if not measured[name] <= limit]


def likely_causes(experience: Experience, *, policy_version: int) -> str:
    """Likely causes of log-probs that differ from those of the policy at `policy_version`, for a message."""
    versions = sorted({scored.response.policy_version for scored in experience.scored} - {policy_version})
    if not versions:
        return UNKNOWN_CAUSES
    named = ", ".join(map(str, versions[:4]))
    return (
        f"the responses are of policy version {named}, and the policy is at version {policy_version} by now: responses "
        "serve one step, so generate new ones for each"
    )


def check_first_minibatch(
    statistics: PolicyStatistics | None,
    *,
    precision: str,
    step: int,
    objective: ObjectiveConfig = DEFAULT,
    causes: str = UNKNOWN_CAUSES,
) -> None:
    """Warn if the learner's log-probs differ from the sampler's by more than a limit.

    Raises TrainingError beyond ten times a limit.
    """
    if statistics is None:
        return
    for name, value, limit in broken_limits(statistics, precision=precision, objective=objective):
        message = (
            f"step {step}: the first minibatch has {name} = {value:.3g}, at most {limit:g} is right in {precision}. "
            f"Nothing was learned yet, so sampler and learner disagree: {causes}"
        )
        if not value <= 10 * limit:
            raise TrainingError(message)
        warnings.warn(message, stacklevel=2)
