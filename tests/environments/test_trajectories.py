"""Calls of the policy and answers of an environment become one flat record."""

import math
from dataclasses import replace

import pytest

from played_environments import rows
from proximo.environments.environment import EnvironmentStep
from proximo.environments.reward import EnvironmentReward
from proximo.environments.trajectory import Trajectory, with_observation
from proximo.records import Finish, Fork, Response, ScoreState
from proximo.rollout.rank_transfers import from_bytes, to_bytes
from proximo.rollout.session import CallRequest, ModelCall

FIRST = with_observation(rows(1)[0], "1 2", (1, 2))


def call(reads: tuple[int, ...], *writes: int, versions: tuple[tuple[int, int], ...] = ((0, 0),)) -> ModelCall:
    request = CallRequest(id=0, lane=0, token_ids=reads, stream=0, first_position=0, max_new_tokens=9)
    return ModelCall(
        request=request, token_ids=writes, logprobs=(-0.5,) * len(writes), finish=Finish.EOS, versions=versions
    )


def answer(trajectory: Trajectory, reward: float = 0.0, **info) -> None:
    trajectory.add_answer(EnvironmentStep(observation="seen", reward=reward, info=info))


def three_turns() -> Trajectory:
    """Turns of 2, 1 and 2 tokens. The second extends the first, after two ids of the environment; the third forks."""
    trajectory = Trajectory(prompt=FIRST, sample_index=3)
    trajectory.add_call(call((1, 2), 10, 11), "a")
    answer(trajectory, 0.5)
    trajectory.add_call(call((1, 2, 10, 11, 20, 21), 12, versions=((1, 0),)), "b")
    answer(trajectory, -1.0, tool_calls=2, malformed_calls=1)
    trajectory.add_call(call((1, 2, 12, 22), 13, 14, versions=((1, 0), (2, 1))), "c")
    answer(trajectory, 2.0, won=True)
    return trajectory


def test_the_tokens_of_a_trajectory_are_flat_and_only_those_of_the_policy_are_in_the_mask():
    response = three_turns().response(Finish.TERMINATED)
    assert response.token_ids == (10, 11, 20, 21, 12, 13, 14)
    assert response.response_mask.tolist() == [True, True, False, False, True, True, True]
    assert response.logprobs.tolist() == [-0.5, -0.5, 0.0, 0.0, -0.5, -0.5, -0.5]
    assert response.token_versions == (0, 0, 0, 0, 1, 1, 2)
    assert response.policy_version == 0
    assert response.forks == (Fork(start=5, context=(1, 2, 12, 22)),)
    assert response.sequences == [((1, 2), (10, 11, 20, 21, 12)), ((1, 2, 12, 22), (13, 14))]
    assert [(turn.start, turn.end, turn.text, turn.reward) for turn in response.episode.turns] == [
        (0, 2, "a", 0.5),
        (4, 5, "b", -1.0),
        (5, 7, "c", 2.0),
    ]
    assert (response.episode.turns[1].num_tool_calls, response.episode.turns[1].num_malformed_calls) == (2, 1)
    assert (response.text, response.episode.info) == ("c", {"won": True})
    assert [(each["role"], each["content"]) for each in response.episode.messages] == [
        *[("assistant", "a"), ("user", "seen"), ("assistant", "b"), ("user", "seen"), ("assistant", "c")]
    ]
    assert response.finish.terminated


def test_what_came_after_the_last_turn_is_read_and_not_learned():
    trajectory = three_turns()
    trajectory.add_prompt((1, 2, 12, 22, 13, 14, 23))
    response = trajectory.response(Finish.TRUNCATED)
    assert response.sequences[-1] == ((1, 2, 12, 22), (13, 14, 23))
    assert response.response_mask.tolist()[-1] is False
    forked = three_turns()
    forked.add_prompt((1, 2, 14, 23))
    assert forked.response(Finish.TRUNCATED).sequences[-1] == ((1, 2, 14, 23), ())


def test_rewards_are_those_of_turns_or_their_sum():
    response = three_turns().response(Finish.TERMINATED)
    (summed,), (by_turn,) = (EnvironmentReward(per_turn=each).score([response]) for each in (False, True))
    assert (summed.score, summed.token_rewards, by_turn.score) == (1.5, None, 1.5)
    assert by_turn.token_rewards == (0.0, 0.5, 0.0, 0.0, -1.0, 0.0, 2.0)


def test_a_fault_is_never_a_reward():
    failed = three_turns().response(Finish.ABORTED, failure="timeout: step() did not answer")
    (scored,) = EnvironmentReward(per_turn=True).score([failed])
    assert (scored.state, scored.reason) == (ScoreState.INFRASTRUCTURE_FAULT, "timeout: step() did not answer")
    assert not scored.valid
    assert not EnvironmentReward(per_turn=False).score([replace(failed, finish=Finish.EOS, episode=None)])[0].valid


@pytest.mark.parametrize("finish", [Finish.TERMINATED, Finish.TRUNCATED])
def test_a_trajectory_is_sent_to_other_ranks_as_it_is(finish: Finish):
    given = three_turns().response(finish)
    ((index, sent),) = from_bytes(to_bytes([(0, given)]), rows(1))
    assert index == 0
    for name in set(Response.__slots__) - {"logprobs", "response_mask"}:
        assert getattr(sent, name) == getattr(given, name), name


@pytest.mark.parametrize("value", [["search"], "two", None, math.nan])
def test_an_info_of_ones_own_is_no_count_of_tools(value: object) -> None:
    trajectory = Trajectory(prompt=FIRST, sample_index=0)
    trajectory.add_call(call((1, 2), 10), "a")
    answer(trajectory, tool_calls=value, malformed_calls=2)
    assert (trajectory.turns[-1].num_tool_calls, trajectory.turns[-1].num_malformed_calls) == (0, 2)
