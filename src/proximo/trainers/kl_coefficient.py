"""The KL coefficient of the next step. The formula is in algorithms/controllers.py."""

from proximo.algorithms.controllers import adaptive_kl
from proximo.config.ppo import KLConfig
from proximo.records import Experience
from proximo.trainers.step_metrics import counted_responses, sequence_kl


def adapted_coefficient(coefficient: float, experience: Experience, config: KLConfig) -> float:
    """Moved towards the target by the mean KL of the step; the same where it is constant, or no response counts."""
    divergences = sequence_kl(experience)
    observed = [value for i in counted_responses(experience) if (value := divergences[i]) is not None]
    if config.target is None or not observed:
        return coefficient
    return adaptive_kl(
        coefficient,
        observed=sum(observed) / len(observed),
        target=config.target,
        horizon=config.horizon,
        num_sequences=len(observed),
    )
