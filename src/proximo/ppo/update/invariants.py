"""What must be true of every step, whatever is learned: checked while a run goes on. Not the tests of the code."""

import warnings

from proximo.algorithms.losses import PolicyStatistics
from proximo.errors import TrainingError
from proximo.records import Experience

FIRST_MINIBATCH_LIMITS = {
    "float32": {"max_abs_log_ratio": 1e-3, "mean_abs_log_ratio": 1e-5},
    "tf32": {"mean_abs_log_ratio": 0.005, "clip_fraction": 0.01},
    "bf16": {"mean_abs_log_ratio": 0.02, "clip_fraction": 0.01},
    "bf16_float32_head": {"mean_abs_log_ratio": 0.02, "clip_fraction": 0.01},
}
"""Before anything was learned the ratio is 1 up to rounding; above these the run is warned, above ten times stopped."""
UNKNOWN_CAUSES = (
    "likely causes are a model with dropout or state, weights changed from outside, or responses of another model"
)


def broken_limits(
    statistics: PolicyStatistics, *, precision: str, objective: str = "ppo"
) -> list[tuple[str, float, float]]:
    """(what was measured, its value, its limit) for every limit that the first minibatch of a step is beyond.

    The clip of gspo is narrower than the rounding of bf16: what it clips before anything was learned is no sign.
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
    if objective == "gspo":
        limits.pop("clip_fraction", None)
    # Written so that NaN, which is below no limit, counts as beyond.
    return [(name, measured[name], limit) for name, limit in limits.items() if not measured[name] <= limit]


def likely_causes(experience: Experience, *, policy_version: int) -> str:
    """Why log-probs of these responses may not be those of the policy, which has taken `policy_version` updates."""
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
    objective: str = "ppo",
    causes: str = UNKNOWN_CAUSES,
) -> None:
    """Warn, or stop the run, where the learner's log-probs are not those that the responses were sampled with.

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
