"""The state of a run between steps, and how a step moves its parts: KL coefficient and count of equal scores.

The state of roles is in their workers (roles/).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from proximo.algorithms.advantages import NOTHING_SEEN, RunningMoments
from proximo.algorithms.controllers import KLController, adaptive_kl
from proximo.checkpoint.reading import as_record
from proximo.config.ppo.rewards import KL, RewardKLConfig
from proximo.data.difficulty import FilterState
from proximo.distributed.world import current
from proximo.errors import ConfigError
from proximo.ppo.experience import counted_responses, sequence_kl, task_reward_of
from proximo.records import Experience, Scored
from proximo.user_code import user_errors_named
from proximo_verifiers.callables import methods_problem


@dataclass(frozen=True, kw_only=True, slots=True)
class ConstantRewardSteps:
    """Number of consecutive steps whose responses all had the same score."""

    score: float | None = None
    """The score of all these responses; None if the last step had different scores."""
    count: int = 0

    def after(self, scored: Sequence[Scored], *, task_reward: str | None = None) -> "ConstantRewardSteps":
        """The count after one more step. Unscored responses are ignored; a step without scores changes nothing.

        `task_reward`: the component to compare, or None for the score.
        """
        scores = [task_reward_of(s, task_reward) for s in scored if s.valid]
        if not scores:
            return self
        if any(score != scores[0] for score in scores):
            return ConstantRewardSteps()
        return ConstantRewardSteps(score=scores[0], count=self.count + 1 if scores[0] == self.score else 1)


NO_CONSTANT_STEPS = ConstantRewardSteps()
"""The state before the first step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainState:
    """Immutable state of a run. It is replaced after each step that succeeds."""

    kl_coefficient: float
    """KL coefficient of the next step."""
    steps_done: int = 0
    score_moments: RunningMoments = NOTHING_SEEN
    return_moments: RunningMoments = NOTHING_SEEN
    constant_reward_steps: ConstantRewardSteps = NO_CONSTANT_STEPS
    extra_rollouts: int = 0
    """Rollouts beyond one for each step, by `zero_variance_groups: resample`."""
    difficulty: FilterState | None = None
    """State of the difficulty filter; None in a run without one."""

    @property
    def rollouts_done(self) -> int:
        """Rollouts so far. The next one has this number, which its prompts and random key are functions of."""
        return self.steps_done + self.extra_rollouts

    def to_json(self) -> dict[str, Any]:
        """JSON values for a checkpoint. `steps_done` is the number of the checkpoint itself."""
        return {
            "kl_coefficient": self.kl_coefficient,
            "score_moments": asdict(self.score_moments),
            "return_moments": asdict(self.return_moments),
            "constant_reward_steps": asdict(self.constant_reward_steps),
            **({"extra_rollouts": self.extra_rollouts} if self.extra_rollouts else {}),
            "difficulty": None if self.difficulty is None else self.difficulty.to_json(),
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any], *, steps_done: int) -> "TrainState":
        """The state of a checkpoint. Raises CheckpointError if a required entry is missing."""
        difficulty = saved["difficulty"]
        return cls(
            kl_coefficient=saved["kl_coefficient"],
            steps_done=steps_done,
            score_moments=as_record(RunningMoments, saved["score_moments"]),
            return_moments=as_record(RunningMoments, saved["return_moments"]),
            constant_reward_steps=as_record(ConstantRewardSteps, saved["constant_reward_steps"]),
            extra_rollouts=saved.get("extra_rollouts", 0),
            difficulty=None if difficulty is None else FilterState.from_json(difficulty),
        )


def controlled_coefficient(config: KL, controller: KLController) -> float:
    """The controller's coefficient of the first step. Raises ConfigError where another one is given, or no KL."""
    if not config.needs_reference:
        raise ConfigError("kl_controller needs a KL, but ppo.kl is none: remove one of them")
    if config.adaptive is not None or config.coefficient != RewardKLConfig().coefficient:
        raise ConfigError(
            "kl_controller sets the KL coefficient, and so do kl.coefficient and kl.adaptive: remove these two"
        )
    if problem := methods_problem(controller, ["update(kl_values)"]):
        raise ConfigError(
            "kl_controller is an object with a number `coefficient` and a method update(kl_values), such as "
            f"AdaptiveKLController(0.1, target=6.0, horizon=10_000), but {problem}"
        )
    return current().on_rank_0(lambda: _checked(getattr(controller, "coefficient", None)), what="kl_controller")


def adapted_coefficient(
    coefficient: float, experience: Experience, config: KL, controller: KLController | None = None
) -> float:
    """The coefficient of the next step, from the controller or by `kl.adaptive`; unchanged if no response counts.

    A controller is called on rank 0 alone. Raises ConfigError if it returns anything but a finite number of at least 0.
    """
    divergences = sequence_kl(experience)
    observed = [value for i in counted_responses(experience) if (value := divergences[i]) is not None]
    if not observed:
        return coefficient
    if controller is not None:
        return current().on_rank_0(lambda: _moved(controller, observed), what="the method update of kl_controller")
    if config.adaptive is None:
        return coefficient
    return adaptive_kl(
        coefficient,
        observed=sum(observed) / len(observed),
        target=config.adaptive.target,
        horizon=config.adaptive.horizon,
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
