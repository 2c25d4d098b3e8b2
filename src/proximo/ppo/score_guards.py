"""When scores stop the run: too many of them are missing, or all of them are the same. Not what they become."""

from collections.abc import Sequence
from dataclasses import dataclass

from proximo.algorithms.scores import common_score
from proximo.config.ppo.options import GuardConfig
from proximo.errors import TrainingError
from proximo.ppo.groups import outcome_of
from proximo.records import Scored


@dataclass(frozen=True, kw_only=True, slots=True)
class EqualSteps:
    """How many steps in a row had nothing but one score, up to now."""

    score: float | None = None
    """The score of them all; None where the last step had several."""
    count: int = 0

    def after(self, scored: Sequence[Scored], *, outcome: str | None = None) -> "EqualSteps":
        """With one step more. Faulty responses have no say; a step of nothing else changes nothing.

        `outcome`: the component that is looked at, or None for the score.
        """
        scores = [outcome_of(each, outcome) for each in scored if each.valid]
        if not scores:
            return self
        score = common_score(scores)
        if score is None:
            return EqualSteps()
        return EqualSteps(score=score, count=self.count + 1 if score == self.score else 1)


LARGEST_SCORE = 1e18
"""Beyond it the square of a score, and with it every variance, is infinite in float32."""


def refuse_faulty(scored: Sequence[Scored], guards: GuardConfig, *, where: str) -> None:
    """Raises TrainingError where more of a batch than `max_faulty_fraction` could not be scored, or a score is beyond
    what can be computed with."""
    for each in scored:
        if each.valid and abs(each.score) > LARGEST_SCORE:
            raise TrainingError(
                f"{where}: a response was scored {each.score:g}, and beyond {LARGEST_SCORE:g} either way nothing can "
                "be computed in float32: let the reward source return None where it cannot tell, or a smaller number"
            )
    faulty = [each for each in scored if not each.valid]
    limit = guards.max_faulty_fraction
    if len(faulty) > limit * len(scored):
        raise TrainingError(
            f"{where}: {len(faulty)} of {len(scored)} responses could not be scored, more than "
            f"max_faulty_fraction = {limit:g} allows; last reason: {faulty[-1].reason}"
        )


def refuse_equal(equal: EqualSteps, guards: GuardConfig, *, step: int) -> None:
    """Raises TrainingError where all scores of `max_equal_steps` steps in a row are one number."""
    if guards.max_equal_steps is not None and equal.count >= guards.max_equal_steps:
        raise TrainingError(
            f"step {step}: all scores of {equal.count} steps in a row are {equal.score:g}, which is what a dead reward "
            "source looks like, or a task that has nothing left to teach; look at the last samples, and at what the "
            "source answers to them by hand (guards.max_equal_steps: null goes on)"
        )
