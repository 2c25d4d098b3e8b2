"""Updates the KL coefficient after each step. The adaptive controller: algorithms/controllers.py."""

import math
from typing import Any

from proximo.algorithms.controllers import KLController, adaptive_kl
from proximo.config.ppo.kl import KLConfig
from proximo.distributed.world import current
from proximo.errors import ConfigError
from proximo.ppo.counted import counted_responses, sequence_kl
from proximo.records import Experience
from proximo.run.user_code import user_errors_named
from proximo_verifiers.callables import methods_problem


def first_coefficient(config: KLConfig, controller: KLController | None) -> float:
    """The coefficient of the first step. Raises ConfigError for a controller without a KL or beside `kl.target`."""
    if controller is None:
        return config.coefficient
    if config.apply_to == "none":
        raise ConfigError("kl_controller needs a KL, but kl.apply_to is none: remove one of them")
    if config.target is not None or config.coefficient != KLConfig().coefficient:
        raise ConfigError(
            "kl_controller sets the KL coefficient, and so do kl.coefficient and kl.target: remove these two"
        )
    if problem := methods_problem(controller, ["update(kl_values)"]):
        raise ConfigError(
            "kl_controller is an object with a number `coefficient` and a method update(kl_values), such as "
            f"AdaptiveKLController(0.1, target=6.0, horizon=10_000), but {problem}"
        )
    return current().once(lambda: _checked(getattr(controller, "coefficient", None)), what="kl_controller")


def adapted_coefficient(
    coefficient: float, experience: Experience, config: KLConfig, controller: KLController | None = None
) -> float:
    """The coefficient of the next step, from the controller or adapted to `kl.target`; unchanged if no response counts.

    A controller is called on rank 0 alone. Raises ConfigError if it returns anything but a finite number of at least 0.
    """
    divergences = sequence_kl(experience)
    observed = [value for i in counted_responses(experience) if (value := divergences[i]) is not None]
    if not observed:
        return coefficient
    if controller is not None:
        return current().once(lambda: _moved(controller, observed), what="the method update of kl_controller")
    if config.target is None:
        return coefficient
    return adaptive_kl(
        coefficient,
        observed=sum(observed) / len(observed),
        target=config.target,
        horizon=config.horizon,
        num_sequences=len(observed),
    )


def _moved(controller: KLController, observed: list[float]) -> float:
    with user_errors_named("the method update of kl_controller", controller.update):
        moved = controller.update(observed)
    return _checked(moved)


def _checked(coefficient: Any) -> float:
    if not isinstance(coefficient, int | float) or not math.isfinite(coefficient) or coefficient < 0:
        raise ConfigError(f"the KL coefficient of kl_controller must be a number of at least 0, got {coefficient!r}")
    return float(coefficient)
