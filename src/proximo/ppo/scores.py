"""Checks scores against the guards. Scores are asked for in roles/reward.py."""

from collections.abc import Sequence
from dataclasses import dataclass

from proximo.algorithms.score_transforms import common_score
from proximo.config.ppo.options import GuardConfig
from proximo.errors import GuardError
from proximo.ppo.counted import task_reward_of
from proximo.records import Scored


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
        score = common_score(scores)
        if score is None:
            return ConstantRewardSteps()
        return ConstantRewardSteps(score=score, count=self.count + 1 if score == self.score else 1)


NO_CONSTANT_STEPS = ConstantRewardSteps()
"""The state before the first step."""
LARGEST_SCORE = 1e18
"""Largest allowed absolute score: the square of a larger one overflows float32."""


def check_scored_fraction(scored: Sequence[Scored], guards: GuardConfig, *, where: str) -> None:
    """Raises GuardError if more than `max_unscored_fraction` is unscored, or a score exceeds LARGEST_SCORE."""
    for s in scored:
        if s.valid and abs(s.score) > LARGEST_SCORE:
            raise GuardError(
                f"{where}: a response was scored {s.score:g}, and beyond {LARGEST_SCORE:g} either way nothing can "
                "be computed in float32: let the reward source return None where it cannot tell, or a smaller number"
            )
    unscored = [s for s in scored if not s.valid]
    limit = guards.max_unscored_fraction
    if len(unscored) > limit * len(scored):
        raise GuardError(
            f"{where}: {len(unscored)} of {len(scored)} responses could not be scored, more than "
            f"ppo.guards.max_unscored_fraction = {limit:g} allows; last reason: {unscored[-1].reason}"
        )


def check_constant_rewards(equal: ConstantRewardSteps, guards: GuardConfig, *, step: int) -> None:
    """Raises GuardError if all scores of `max_constant_reward_steps` consecutive steps are equal."""
    if guards.max_constant_reward_steps is not None and equal.count >= guards.max_constant_reward_steps:
        raise GuardError(
            f"step {step}: all scores of {equal.count} steps in a row are {equal.score:g}, which is what a dead reward "
            "source looks like, or a task that has nothing left to teach; look at the last samples, and at what the "
            "source answers to them by hand (--resume with ppo.guards.max_constant_reward_steps=null goes on)"
        )
