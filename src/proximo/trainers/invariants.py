"""What must be true of every step, whatever is learned: checked while a run goes on. Not the tests of the code."""

import warnings

from proximo.algorithms.losses import PolicyStatistics
from proximo.errors import TrainingError

FIRST_MINIBATCH_LIMITS = {
    "float32": {"max_abs_log_ratio": 1e-3, "mean_abs_log_ratio": 1e-5},
    "bf16": {"mean_abs_log_ratio": 0.02, "clip_fraction": 0.01},
}
"""Before anything was learned the ratio is 1 up to rounding; above these the run is warned, above ten times stopped."""


def check_first_minibatch(statistics: PolicyStatistics | None, *, precision: str, step: int) -> None:
    """Warn, or stop the run, where the learner's log-probs are not those that the responses were sampled with."""
    if statistics is None or not int(statistics.num_tokens):
        return
    count = statistics.num_tokens.item()
    measured = {
        "max_abs_log_ratio": statistics.max_abs_log_ratio.item(),
        "mean_abs_log_ratio": statistics.abs_log_ratio.item() / count,
        "clip_fraction": statistics.clipped.item() / count,
    }
    for name, limit in FIRST_MINIBATCH_LIMITS[precision].items():
        if not measured[name] <= limit:
            message = (
                f"step {step}: the first minibatch has {name} = {measured[name]:.3g}, at most {limit:g} is right in "
                f"{precision}. Nothing was learned yet, so sampler and learner disagree: likely causes are a model "
                "with dropout or state, weights changed from outside, or responses of another model"
            )
            if not measured[name] <= 10 * limit:
                raise TrainingError(message)
            warnings.warn(message, stacklevel=2)
