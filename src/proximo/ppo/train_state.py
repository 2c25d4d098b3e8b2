"""What a run carries from step to step, but for what belongs to a role: that is with its worker (roles/)."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from proximo.algorithms.scores import NOTHING_SEEN, RunningMoments
from proximo.checkpoint.state import as_record
from proximo.data.difficulty import FilterState
from proximo.ppo.scores import NONE_EQUAL, EqualSteps


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainState:
    """Replaced as a whole after each step, when all of it went well."""

    kl_coefficient: float
    """What a nat costs in the next step."""
    steps_done: int = 0
    score_moments: RunningMoments = NOTHING_SEEN
    return_moments: RunningMoments = NOTHING_SEEN
    equal_steps: EqualSteps = NONE_EQUAL
    difficulty: FilterState | None = None
    """Which prompts are left out, and where their order stands; None in a run without such a filter."""

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint, whose own number are the steps that are done."""
        return {
            "kl_coefficient": self.kl_coefficient,
            "score_moments": asdict(self.score_moments),
            "return_moments": asdict(self.return_moments),
            "equal_steps": asdict(self.equal_steps),
            "difficulty": None if self.difficulty is None else self.difficulty.to_json(),
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any], *, steps_done: int) -> "TrainState":
        """From a checkpoint. Raises CheckpointError where it lacks what cannot be done without."""
        difficulty = saved.get("difficulty")
        return cls(
            kl_coefficient=saved["kl_coefficient"],
            steps_done=steps_done,
            score_moments=as_record(RunningMoments, saved["score_moments"]),
            return_moments=as_record(RunningMoments, saved.get("return_moments", {})),
            equal_steps=as_record(EqualSteps, saved["equal_steps"]),
            difficulty=None if difficulty is None else FilterState.from_json(difficulty),
        )
