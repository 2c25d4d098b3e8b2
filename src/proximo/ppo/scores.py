"""Scores held against the guards, and the best of them kept. Not the asking (roles/reward.py), nor what becomes of a
score (experience.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from proximo.algorithms.scores import common_score
from proximo.config.ppo.options import GuardConfig, PPOConfig
from proximo.errors import DataError, TrainingError
from proximo.ppo.counted import counts, has_score, task_reward_of
from proximo.records import Scored


def keep_best(candidates: Sequence[Scored], config: PPOConfig) -> list[Scored]:
    """Of the `samples_per_prompt` responses to each prompt the `responses_per_prompt` best, in the order sampled.

    The best by the score as the sources gave it; what would count nowhere or has no score comes last. Raises DataError
    where a prompt has another number of responses.
    """
    size = config.sampled_per_prompt
    groups = [candidates[start : start + size] for start in range(0, len(candidates), size)]
    if any(len(group) != size or len({s.response.prompt.id for s in group}) > 1 for group in groups):
        raise DataError(
            f"with samples_per_prompt = {size} a step chooses among {size} responses to each prompt, one prompt after "
            f"the other; it was given {len(candidates)} responses that do not come in such groups"
        )
    kept = [
        best_of(group, config.responses_per_prompt, lambda s: counts(s, config) and has_score(s, config))
        for group in groups
    ]
    return [each for group in kept for each in group]


def best_of(group: Sequence[Scored], num_kept: int, has_say: Callable[[Scored], bool]) -> list[Scored]:
    """The `num_kept` with the highest scores, in their own order; of equals the first, and last what has no say."""

    def rank(index: int) -> tuple[bool, float]:
        has = has_say(group[index])
        return not has, -group[index].score if has else 0.0

    best = sorted(range(len(group)), key=rank)[:num_kept]
    return [group[index] for index in sorted(best)]


@dataclass(frozen=True, kw_only=True, slots=True)
class EqualSteps:
    """How many steps in a row had nothing but one score, up to now."""

    score: float | None = None
    """The score of them all; None where the last step had several."""
    count: int = 0

    def after(self, scored: Sequence[Scored], *, task_reward: str | None = None) -> "EqualSteps":
        """With one step more. Faulty responses have no say; a step of nothing else changes nothing.

        `task_reward`: the component that is looked at, or None for the score.
        """
        scores = [task_reward_of(each, task_reward) for each in scored if each.valid]
        if not scores:
            return self
        score = common_score(scores)
        if score is None:
            return EqualSteps()
        return EqualSteps(score=score, count=self.count + 1 if score == self.score else 1)


NONE_EQUAL = EqualSteps()
"""Before the first step."""
LARGEST_SCORE = 1e18
"""Beyond it the square of a score, and with it every variance, is infinite in float32."""


def refuse_faulty(scored: Sequence[Scored], guards: GuardConfig, *, where: str) -> None:
    """Raises TrainingError where more of a batch than `max_unscored_fraction` could not be scored, or a score is beyond
    what can be computed with."""
    for each in scored:
        if each.valid and abs(each.score) > LARGEST_SCORE:
            raise TrainingError(
                f"{where}: a response was scored {each.score:g}, and beyond {LARGEST_SCORE:g} either way nothing can "
                "be computed in float32: let the reward source return None where it cannot tell, or a smaller number"
            )
    faulty = [each for each in scored if not each.valid]
    limit = guards.max_unscored_fraction
    if len(faulty) > limit * len(scored):
        raise TrainingError(
            f"{where}: {len(faulty)} of {len(scored)} responses could not be scored, more than "
            f"max_unscored_fraction = {limit:g} allows; last reason: {faulty[-1].reason}"
        )


def refuse_equal(equal: EqualSteps, guards: GuardConfig, *, step: int) -> None:
    """Raises TrainingError where all scores of `max_constant_reward_steps` steps in a row are one number."""
    if guards.max_constant_reward_steps is not None and equal.count >= guards.max_constant_reward_steps:
        raise TrainingError(
            f"step {step}: all scores of {equal.count} steps in a row are {equal.score:g}, which is what a dead reward "
            "source looks like, or a task that has nothing left to teach; look at the last samples, and at what the "
            "source answers to them by hand (guards.max_constant_reward_steps: null goes on)"
        )
