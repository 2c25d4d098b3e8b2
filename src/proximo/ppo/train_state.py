"""The state of a run between steps, except that of roles, which their workers hold (roles/)."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from proximo.algorithms.score_transforms import NOTHING_SEEN, RunningMoments
from proximo.checkpoint.reading import as_record
from proximo.data.difficulty import FilterState
from proximo.ppo.scores import NO_CONSTANT_STEPS, ConstantRewardSteps


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
