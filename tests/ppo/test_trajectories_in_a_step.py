"""Trajectories in a step: the value after a cut, rewards of turns, one count each. Numbers worked by hand."""

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from proximo.algorithms.advantages import StepRewards
from proximo.config.ppo.advantage import AdvantageConfig
from proximo.config.ppo.options import PPOConfig
from proximo.environments.reward import EnvironmentReward
from proximo.errors import ConfigError, GuardError
from proximo.ppo.episodes import episode_fields, episode_metrics, evaluation_metrics
from proximo.ppo.selection import check_scored_fraction
from proximo.ppo.step import experience_of
from proximo.ppo.train_state import TrainState
from proximo.ppo.update.epochs import cut_minibatch
from proximo.records import Episode, Experience, Finish, Fork, Passes, Response, Scored, Turn
from records_made import prompt, response

MASK = [True, False, True, True, False]
"""Two turns, each with an answer of the environment behind it."""
VALUES = [0.1, 9.0, 0.2, 0.3, 9.0, 0.5]
TURNS = (Turn(start=0, end=1, text="a", reward=1.0), Turn(start=2, end=4, text="b", reward=2.0))


def played(finish: Finish, *, failure: str | None = None, to: str = "p", **fields: Any) -> Response:
    episode = Episode(turns=TURNS, info={"won": True, "path": "x"}, failure=failure)
    made = response([7, 8, 9, 10, 11], to=prompt(to), mask=MASK, finish=finish, text="b")
    return replace(made, episode=episode, **fields)


def scored_by_environment(*responses: Response, per_turn: bool = True) -> list[Scored]:
    return EnvironmentReward(per_turn=per_turn).score(responses)


def experience(batch: list[Scored], *, values: list[float] | None = VALUES, **options: Any) -> Experience:
    plain = {"advantage": {"standardise": False, "gae_lambda": 1.0}, "kl": "none"}
    passes = Passes(
        old_logprobs=torch.zeros(5 * len(batch)),
        values=None if values is None else torch.tensor(values * len(batch)),
    )
    return experience_of(
        batch, passes, TrainState(kl_coefficient=0.0), config=PPOConfig(**(plain | options))
    ).experience


def returns_of(finish: Finish, **options: Any) -> list[float]:
    made = experience(scored_by_environment(played(finish)), **options)
    assert made.returns is not None
    return made.returns[made.mask].tolist()


def test_each_turn_has_its_reward_at_its_last_token() -> None:
    made = experience(scored_by_environment(played(Finish.TERMINATED)))
    assert made.rewards.tolist() == [1.0, 0.0, 0.0, 2.0, 0.0]
    summed = experience(scored_by_environment(played(Finish.TERMINATED), per_turn=False))
    assert summed.rewards.tolist() == [0.0, 0.0, 0.0, 3.0, 0.0]


class TurnReturnsConfig(AdvantageConfig):
    """An estimator of one's own: the rewards of a turn and of later ones, halved with each turn."""

    is_per_token: ClassVar[bool] = True

    def estimate(self, step: StepRewards) -> tuple[torch.Tensor, None]:
        assert step.reference_logprobs is None
        assert step.old_logprobs.shape == step.rewards.shape
        advantages = torch.zeros_like(step.rewards)
        for row in torch.arange(sum(step.lengths)).split(list(step.lengths)):
            later = 0.0
            for turn in reversed(range(int(step.turns[row].max()) + 1)):
                own = row[step.turns[row] == turn]
                later = step.rewards[own].sum() + 0.5 * later
                advantages[own] = later
        return advantages, None


def test_an_estimator_of_ones_own_sees_the_turns() -> None:
    longer = (TURNS[0], Turn(start=2, end=3, text="b", reward=4.0), Turn(start=3, end=4, text="c", reward=2.0))
    three = replace(played(Finish.TERMINATED, to="q"), episode=Episode(turns=longer))
    answer = response([7, 8, 9, 10, 11], to=prompt("r"), mask=[True] * 5)
    scored = [*scored_by_environment(played(Finish.TERMINATED), three), Scored(response=answer, score=8.0)]
    made = experience(scored, values=None, advantage=TurnReturnsConfig())
    assert made.advantages.tolist() == [2.0, 0.0, 2.0, 2.0, 0.0, 3.5, 0.0, 5.0, 2.0, 0.0, 8.0, 8.0, 8.0, 8.0, 8.0]


def test_what_the_environment_ended_is_worth_nothing_afterwards() -> None:
    assert returns_of(Finish.TERMINATED) == pytest.approx([3.0, 2.0, 2.0])


@pytest.mark.parametrize("truncation", ["scored", "unscored", "mask", "bootstrap"])
def test_what_the_environment_cut_goes_on_with_the_critics_value_whatever_truncation_says(truncation: str) -> None:
    assert returns_of(Finish.TRUNCATED, truncation=truncation) == pytest.approx([3.5, 2.5, 2.5])


def test_a_limit_of_the_run_counts_as_truncation_says() -> None:
    """Where the value of the rest is added, what the environment gave before stays; a text without an end has none."""
    assert returns_of(Finish.LENGTH) == pytest.approx([3.0, 2.0, 2.0])
    assert returns_of(Finish.LENGTH, truncation="bootstrap") == pytest.approx([3.5, 2.5, 2.5])
    assert returns_of(Finish.LENGTH, truncation="mask") == []
    unscored = experience(scored_by_environment(played(Finish.LENGTH)), truncation="unscored")
    assert unscored.rewards.tolist() == [0.0] * 5


def test_an_estimator_of_whole_responses_takes_the_sum() -> None:
    group = {"advantage": {"kind": "group_centred", "standardise": False}, "responses_per_prompt": 2}
    batch = scored_by_environment(played(Finish.TERMINATED), per_turn=False)
    batch += [replace(batch[0], score=1.0)]
    made = experience(batch, values=None, **group)
    assert made.advantages.tolist() == [1.0, 0.0, 1.0, 1.0, 0.0, -1.0, 0.0, -1.0, -1.0, 0.0]
    with pytest.raises(ConfigError, match="one advantage per response"):
        experience(scored_by_environment(played(Finish.TERMINATED), played(Finish.EOS)), values=None, **group)


def test_a_failed_trajectory_counts_nowhere_and_too_many_end_the_run() -> None:
    failed = played(Finish.ABORTED, failure="died: its process was ended by SIGKILL")
    batch = scored_by_environment(played(Finish.TERMINATED), failed)
    assert experience(batch).mask.tolist() == [*MASK, *[False] * 5]
    guards = PPOConfig(guards={"max_unscored_fraction": 0.4}).guards
    with pytest.raises(GuardError, match="1 of 2 responses could not be scored.*last reason: died: its process"):
        check_scored_fraction(batch, guards, where="step 1")


def test_a_forked_trajectory_counts_once_in_an_update() -> None:
    fork = Fork(start=2, context=(5, 6, 7))
    batch = scored_by_environment(played(Finish.TERMINATED, forks=(fork,)), played(Finish.TERMINATED, to="q"))
    made = experience(batch)
    columns = {"advantages": made.advantages}
    (micro,) = cut_minibatch(made, columns, [0, 1], token_budget=100, device=torch.device("cpu"))
    assert (micro.num_update_responses, micro.num_update_tokens) == (2, 6)
    assert micro.packed.response_lengths == (5, 5)
    assert micro.packed.packed.lengths == (1, 3, 5, 6), "all three sequences begin with one token"
    assert micro.packed.targets.tolist() == [7, 8, 9, 10, 11] * 2
    small = cut_minibatch(made, columns, [0, 1], token_budget=10, device=torch.device("cpu"))
    assert [each.packed.response_lengths for each in small] == [(5,), (5,)]


def test_metrics_show_turns_faults_and_numbers_of_the_environment() -> None:
    turns = (replace(TURNS[0], num_tool_calls=2, num_malformed_calls=1),)
    short = replace(played(Finish.TRUNCATED), episode=Episode(turns=turns, info={"won": False, "score": 3}))
    failed = played(Finish.ABORTED, failure="timeout: step() did not answer")
    batch = scored_by_environment(played(Finish.TERMINATED), short, failed)
    line = {name: value.value for name, value in episode_metrics(batch).items()}
    assert line == {
        "environment/turns_mean": 1.5,
        "environment/turns_max": 2,
        "environment/terminated_fraction": 0.5,
        "environment/truncated_fraction": 0.5,
        "environment/policy_token_fraction": 0.6,
        "environment/forks_mean": 0.0,
        "environment/tool_calls_mean": 1.0,
        "environment/malformed_calls": 1,
        "environment/cut_observations": 0,
        "environment/faults": 1,
        "environment/faults/timeout": 1,
        "environment/info/won": 0.5,
        "environment/info/score": 3.0,
    }
    held_out = {name: value.value for name, value in evaluation_metrics(batch).items()}
    assert (held_out["evaluation/turns"], held_out["evaluation/info/won"]) == (1.5, 0.5)


def test_samples_show_every_turn() -> None:
    turns = (replace(TURNS[0], observation="higher", num_tool_calls=1), replace(TURNS[1], observation="right"))
    fields = episode_fields(Episode(turns=turns), num_forks=1)
    assert fields["response"] == (
        "[turn 1, 1 tool call] a\n[environment, reward 1] higher\n[turn 2] b\n[environment, reward 2] right"
    )
    assert [turn["reward"] for turn in fields["turns"]] == [1.0, 2.0]
    assert fields["forks"] == 1
