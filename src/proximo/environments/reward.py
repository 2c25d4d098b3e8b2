"""The reward of an environment as a source of scores: the sum of what it gave, turn by turn."""

import math
from collections.abc import Sequence
from typing import Any

from proximo.records import Episode, Finish, Response, Scored, ScoreState
from proximo.rewards.weighted import as_pairs


class EnvironmentReward:
    """Reads the rewards of the episodes. One whose environment failed has no score."""

    name = "environment"
    on_all_ranks = True

    def __init__(self, *, per_turn: bool) -> None:
        """`per_turn`: each turn's reward is that of its last token, for estimators that take rewards of tokens; else
        the trajectory has one reward, their sum.
        """
        self._per_turn = per_turn

    def score(self, responses: Sequence[Response]) -> list[Scored]:
        """See `RewardSource.score`. A response that no environment answered has no score."""
        return [self._scored(response) for response in responses]

    def _scored(self, response: Response) -> Scored:
        episode = response.episode
        if episode is None or response.finish is Finish.ABORTED:
            reason = "it was played in no environment" if episode is None else episode.failure
            state = ScoreState.INFRASTRUCTURE_FAULT
            return Scored(response=response, score=math.nan, state=state, reason=reason)
        earned = token_rewards(episode, len(response.token_ids)) if self._per_turn else None
        return Scored(response=response, score=episode.reward, token_rewards=earned)


def token_rewards(episode: Episode, num_tokens: int) -> tuple[float, ...]:
    """The reward of each turn at its last token; 0 elsewhere."""
    rewards = [0.0] * num_tokens
    for turn in episode.turns:
        rewards[turn.end - 1] += turn.reward
    return tuple(rewards)


def with_environment(reward: Any, *, per_turn: bool) -> Any:
    """A reward in any form, or None, together with the environment's; unchanged if that is among its sources."""
    pairs = [] if reward is None else as_pairs(reward)
    if any(isinstance(source, EnvironmentReward) for _, source in pairs):
        return reward
    return [(1.0, EnvironmentReward(per_turn=per_turn)), *pairs]
