"""Selects the responses that a step trains on: all, the best of n, or groups whose scores differ. Checks their scores:
the guards here end a run in which too many have none, or all scores of too many steps are equal."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from proximo.config.ppo.losses import GuardConfig
from proximo.config.ppo.options import PPOConfig
from proximo.errors import DataError, GuardError
from proximo.ppo.experience import counted_mask, counts, has_score, in_zero_variance_group
from proximo.ppo.train_state import ConstantRewardSteps, TrainState
from proximo.records import Response, Scored

LARGEST_SCORE = 1e18
"""Largest allowed absolute score: the square of a larger one overflows float32."""


class Batch(NamedTuple):
    """The responses that a step trains on, among all that it sampled."""

    scored: list[Scored]
    responses: list[Response]
    """The responses of `scored`."""
    sampled: list[Scored]
    num_rollouts: int
    resamples: bool
    """Whether groups of several rollouts were chosen from."""


def groups_of_step(scored: Sequence[Scored], config: PPOConfig) -> list[tuple[list[Scored], bool]]:
    """The responses to each prompt of a rollout, and whether they are a group of zero variance."""
    equal = in_zero_variance_group(scored, counted_mask(scored, config), config).tolist()
    size = config.sampled_per_prompt
    starts = range(0, len(scored), size)
    return [(list(scored[start : start + size]), all(equal[start : start + size])) for start in starts]


def has_enough_groups(rollouts: Sequence[Sequence[Scored]], *, config: PPOConfig) -> bool:
    """Whether the rollouts have groups with different task rewards for a whole step."""
    equal = [is_equal for rollout in rollouts for _, is_equal in groups_of_step(rollout, config)]
    return equal.count(False) >= config.prompts_per_step


def select(rollouts: Sequence[Sequence[Scored]], state: TrainState, *, config: PPOConfig, resamples: bool) -> Batch:
    """The responses to train on. `resamples`: among groups of several rollouts, those with different task rewards.

    Raises GuardError if all scores of too many steps were equal: of all samples, as the best of n may well be equal.
    """
    sampled = [scored for rollout in rollouts for scored in rollout]
    equal = state.constant_reward_steps.after(sampled, task_reward=config.task_reward)
    check_constant_rewards(equal, config.guards, step=state.steps_done + 1)
    chosen = sampled
    if config.samples_per_prompt is not None:
        chosen = keep_best(sampled, config)
    elif resamples:
        chosen = first_different(rollouts, config)
    return Batch(chosen, [scored.response for scored in chosen], sampled, len(rollouts), resamples)


def first_different(rollouts: Sequence[Sequence[Scored]], config: PPOConfig) -> list[Scored]:
    """The first `prompts_per_step` groups with different task rewards, filled up with groups of equal ones."""
    groups = [group for rollout in rollouts for group in groups_of_step(rollout, config)]
    kept = sorted(groups, key=lambda group: group[1])[: config.prompts_per_step]
    return [scored for group, _ in kept for scored in group]


def keep_best(candidates: Sequence[Scored], config: PPOConfig) -> list[Scored]:
    """Best of n: keep `responses_per_prompt` of the `samples_per_prompt` responses to each prompt, in sampling order.

    Responses are ranked by raw score; those that do not count or have no score come last. A loss over pairs keeps the
    best and the worst one, of equal best ones the first, of equal worst ones the last. Raises DataError if a prompt has
    another number of responses.
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

    kept: list[Scored] = []
    for group in groups:
        chosen = ranked = _ranked(group, eligible)
        if config.policy_loss.objective.is_pairwise:
            worst = max(2, sum(map(eligible, group))) - 1  # another stands in for an eligible one that is missing
            chosen = [ranked[0], ranked[worst]]
        kept += [group[index] for index in sorted(chosen[: config.responses_per_prompt])]
    return kept


def _ranked(group: Sequence[Scored], eligible: Callable[[Scored], bool]) -> list[int]:
    """Indices of the group, the best first, equal ones in their given order, those that are not eligible last."""

    def rank(index: int) -> tuple[bool, float]:
        ranked = eligible(group[index])
        return not ranked, -group[index].score if ranked else 0.0

    return sorted(range(len(group)), key=rank)


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
