"""Scores on their way to rewards: one order, and nothing of what does not count. Numbers worked by hand."""

import math
from dataclasses import replace
from statistics import pstdev
from typing import Any

import pytest
import torch

from proximo.algorithms.advantages import NOTHING_SEEN, ReturnSpread, RunningMoments
from proximo.config.ppo.options import GuardConfig, PPOConfig
from proximo.errors import TrainingError
from proximo.ppo.experience import RawAdvantages, ShapedScores, StepExperience, count_responses, shape_scores
from proximo.ppo.selection import check_constant_rewards
from proximo.ppo.step import experience_of
from proximo.ppo.step_metrics import experience_metrics
from proximo.ppo.train_state import ConstantRewardSteps, TrainState
from proximo.records import Experience, Finish, Passes, Scored, ScoreState
from records_made import prompt, response, scored
from roles_made import outcome_of

FAULTY = scored(math.nan, state=ScoreState.INFRASTRUCTURE_FAULT)


def cut(score: float, num_tokens: int = 3) -> Scored:
    return scored(score, of=response([7] * num_tokens, finish=Finish.LENGTH))


def ended(score: float, num_tokens: int = 3) -> Scored:
    return scored(score, of=response([7] * num_tokens))


def shape(
    batch: list[Scored],
    *,
    counts: list[bool] | None = None,
    moments: RunningMoments = NOTHING_SEEN,
    truncation: Any = "scored",
    **options: Any,
) -> ShapedScores:
    config = PPOConfig(rollout={"max_new_tokens": 8}, score=options, truncation=truncation)
    counted = torch.tensor(counts or [each.valid for each in batch])
    found = count_responses(batch, config)._replace(counted=counted)
    return shape_scores(batch, found, config=config, moments=moments)


def made(batch: list[Scored], *, reference: list[float] | None = None, **options) -> Experience:
    """The experience at values of 0 and a KL coefficient of 1."""
    old = torch.cat([each.response.logprobs for each in batch])
    passes = Passes(
        old_logprobs=old,
        reference_logprobs=torch.tensor(reference) if reference else None,
        values=torch.zeros(len(old) + len(batch)),
    )
    base = {
        "kl": {"kind": "reward" if reference else "none"},
        "advantage": {"standardise": False, "gae_lambda": 1.0},
    }
    return experience_of(batch, passes, TrainState(kl_coefficient=1.0), config=PPOConfig(**(base | options)))[0]


def test_a_single_first_score_is_neither_nan_nor_blown_up() -> None:
    assert shape([ended(0.5)], normalise="scale").values.tolist() == [0.5]
    assert shape([ended(0.5)], normalise="standardise").values.tolist() == [0.0]


@pytest.mark.parametrize("mode", ["zero_mean", "keep_mean"])
def test_tokens_that_do_not_count_have_no_part_in_the_whitening_and_leak_nothing(mode: str) -> None:
    plain = [ended(1.0), ended(-0.5, num_tokens=2)]
    with_tool = scored(1.0, of=response([7, 7, 7, 9], mask=[True, True, True, False]))
    others = [with_tool, plain[1], FAULTY, cut(50.0)]
    options = {"score": {"whiten_rewards": mode}, "truncation": "mask"}
    alone, among = made(plain, **options), made(others, **options)
    mask = torch.tensor([True] * 3 + [False] + [True] * 2 + [False] * 6)
    assert among.mask.equal(mask)
    torch.testing.assert_close(among.rewards[mask], alone.rewards, rtol=0, atol=1e-6)
    torch.testing.assert_close(among.advantages[mask], alone.advantages, rtol=0, atol=1e-6)
    assert not among.rewards[~mask].any()


FLAT = ReturnSpread(deviation=0.0, seen=NOTHING_SEEN, is_flat=True)


def test_metrics_tell_raw_and_shaped_scores_apart() -> None:
    to = [prompt("a"), prompt("b")]
    batch = [
        replace(scored(score, of=response([7] * 3, to=to[place])), answer_score=answer)
        for score, place, answer in [(5.0, 0, 1.0), (3.0, 0, 1.0), (2.0, 1, 4.0)]
    ]
    options = {"minus_reference_answer": True, "normalise": "standardise", "min_tokens": 4, "min_tokens_penalty": 1.0}
    raw = RawAdvantages(mean=0.0, variance=0.0, num_tokens=9, spread=FLAT)
    step = StepExperience(made([*batch, FAULTY]), raw, shape([*batch, FAULTY], **options))
    found = experience_metrics(outcome_of(step), PPOConfig(score=options))
    told = {name: value.value for name, value in found.items() if name.startswith("score/")}
    # Beside their answers: 4, 2 and -2; mean 4/3, unbiased deviation sqrt(28/3).
    assert told == pytest.approx(
        {
            "score/mean": 10 / 3,
            "score/std": pstdev([5, 3, 2]),
            "score/best_fraction": 1 / 3,
            "score/shaped_mean": -1.0,
            "score/shaped_std": pstdev([4, 2, -2]) / (28 / 3) ** 0.5,
            "score/penalised_fraction": 1.0,
            "score/answer_mean": 2.5,
            "score/running_mean": 4 / 3,
            "score/running_std": (28 / 3) ** 0.5,
        },
        abs=1e-6,
    )


def test_steps_of_one_score_are_counted_and_others_begin_again() -> None:
    counted = ConstantRewardSteps()
    told = []
    for scores in ([0.0, 0.0], [0.0, math.nan], [], [0.0], [1.0, 1.0], [1.0, 2.0], [1.0]):
        batch = [FAULTY if math.isnan(score) else scored(score) for score in scores]
        counted = counted.after(batch)
        told.append((counted.score, counted.count))
    assert told == [(0, 1), (0, 2), (0, 2), (0, 3), (1, 1), (None, 0), (1, 1)]


def test_the_run_stops_at_the_given_number_of_equal_steps_and_not_before() -> None:
    check_constant_rewards(ConstantRewardSteps(score=0.0, count=99), GuardConfig(), step=1)
    check_constant_rewards(ConstantRewardSteps(score=0.0, count=2), GuardConfig(max_constant_reward_steps=3), step=7)
    with pytest.raises(TrainingError, match="step 8: all scores of 3 steps in a row are 0"):
        check_constant_rewards(
            ConstantRewardSteps(score=0.0, count=3), GuardConfig(max_constant_reward_steps=3), step=8
        )
