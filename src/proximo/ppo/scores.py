"""Checks scores against the guards and selects the best of n. Scores are asked for in roles/reward.py."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from proximo.algorithms.scores import common_score
from proximo.config.ppo.options import GuardConfig, PPOConfig
from proximo.errors import DataError, GuardError
from proximo.ppo.counted import counts, has_score, task_reward_of
from proximo.records import Scored


def keep_best(candidates: Sequence[Scored], config: PPOConfig) -> list[Scored]:
    """Best of n: keep `responses_per_prompt` of the `samples_per_prompt` responses to each prompt, in sampling order.

    Responses are ranked by raw score; those that do not count or have no score come last. A loss over pairs keeps the
    best and the worst one. Raises DataError if a prompt has another number of responses.
    """
    size = config.sampled_per_prompt
    groups = [candidates[start : start + size] for start in range(0, len(candidates), size)]
    if any(len(group) != size or len({s.response.prompt.id for s in group}) > 1 for group in groups):
        raise DataError(
            f"with samples_per_prompt = {size} a step chooses among {size} responses to each prompt, one prompt after "
            f"the other; it was given {len(candidates)} responses that do not come in such groups"
        )

    def eligible(scored: Scored) -> bool:
        return counts(scored, config) and has_score(scored, config)

    if config.policy_loss.is_pairwise:
        kept = [best_and_worst_of(group, eligible) for group in groups]
    else:
        kept = [best_of(group, config.responses_per_prompt, eligible) for group in groups]
    return [scored for group in kept for scored in group]


def best_of(group: Sequence[Scored], num_kept: int, eligible: Callable[[Scored], bool]) -> list[Scored]:
    """The `num_kept` responses with the highest scores, in their given order.

    The first of equal ones is kept. Responses that are not eligible come last.
    """
    return [group[index] for index in sorted(_ranked(group, eligible)[:num_kept])]


def best_and_worst_of(group: Sequence[Scored], eligible: Callable[[Scored], bool]) -> list[Scored]:
    """The responses with the highest and the lowest score, in their given order.

    The first of equal best ones and the last of equal worst ones. Another response stands in for an eligible one that
    is missing.
    """
    ranked, num_eligible = _ranked(group, eligible), sum(eligible(scored) for scored in group)
    return [group[index] for index in sorted((ranked[0], ranked[max(2, num_eligible) - 1]))]


def _ranked(group: Sequence[Scored], eligible: Callable[[Scored], bool]) -> list[int]:
    """Indices of the group, the best first, equal ones in their given order, those that are not eligible last."""

    def rank(index: int) -> tuple[bool, float]:
        ranked = eligible(group[index])
        return not ranked, -group[index].score if ranked else 0.0

    return sorted(range(len(group)), key=rank)


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
