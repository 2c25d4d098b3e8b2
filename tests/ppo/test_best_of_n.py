"""More responses are sampled than are trained on, and the best are kept: which they are, and what is still counted."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ppo_trainers import lengths, ppo_trainer
from proximo.errors import DataError, TrainingError
from proximo.ppo.selection import keep_best
from proximo.ppo.trainer import PPOTrainer
from proximo.records import Finish, Scored, ScoreState
from proximo.rewards.function import FunctionReward
from records_made import response, scored

PROMPTS = ["ab", "cde", "f"]


def trainer(reward: Any = lengths, **options: Any) -> PPOTrainer:
    base = {"prompts_per_step": 3, "responses_per_prompt": 2, "samples_per_prompt": 5, "rollout": {"max_new_tokens": 5}}
    return ppo_trainer(reward=FunctionReward(reward), **(base | options))


def keep(candidates: list[Scored], **options: Any) -> list[int]:
    """The places of those that are kept."""
    config = {"samples_per_prompt": len(candidates), "responses_per_prompt": 2, "rollout": {"max_new_tokens": 3}}
    kept = keep_best(candidates, trainer(**(config | options)).config)
    return [next(i for i, each in enumerate(candidates) if each is one) for one in kept]


def test_the_highest_scores_are_kept_in_the_order_in_which_they_were_sampled() -> None:
    assert keep([scored(s) for s in (0.5, 3.0, -1.0, 2.0, 1.0)]) == [1, 3]
    assert keep([scored(s) for s in (2.0, 0.0, 3.0)]) == [0, 2]


def test_of_equals_the_first_are_kept_whatever_their_length() -> None:
    candidates = [scored(1.0, of=response([7] * n)) for n in (1, 2, 3)]
    assert keep(candidates) == [0, 1]


def test_what_has_no_say_in_the_step_is_kept_last() -> None:
    fault = scored(math.nan, state=ScoreState.INFRASTRUCTURE_FAULT)
    cut, empty = scored(9.0, of=response(finish=Finish.LENGTH)), scored(9.0, of=response([]))
    assert keep([fault, scored(-2.0), scored(-3.0)]) == [1, 2]
    assert keep([fault, scored(-2.0), fault]) == [0, 1]
    assert keep([empty, scored(-2.0), scored(-3.0)]) == [1, 2]
    assert keep([cut, scored(-2.0), scored(-3.0)]) == [0, 1]
    assert keep([cut, scored(-2.0), scored(-3.0)], truncation="mask") == [1, 2]
    assert keep([cut, scored(-2.0), scored(-3.0)], truncation="unscored") == [1, 2]


def test_a_step_learns_from_the_best_and_counts_the_rest() -> None:
    made = trainer()
    samples = made.generate(PROMPTS)
    assert [r.sample_index for r in samples] == [0, 1, 2, 3, 4] * 3
    scores = [float(len(r.text)) for r in samples]
    outcome = made.run_step(prompts=[r.prompt for r in samples[::5]])
    groups = [scores[i : i + 5] for i in (0, 5, 10)]
    best = [sorted(sorted(range(5), key=lambda i: -group[i])[:2]) for group in groups]
    assert [s.response.sample_index for s in outcome.experience.scored] == [i for kept in best for i in kept]

    line = made.metrics(outcome)
    kept = [group[i] for group, indices in zip(groups, best, strict=True) for i in indices]
    assert line["score/mean"].value == pytest.approx(sum(kept) / 6)
    assert line["score/sampled_mean"].value == pytest.approx(sum(scores) / 15)
    assert line["score/mean"].value > line["score/sampled_mean"].value
    assert line["response/sampled"].value == 15
    tokens = sum(len(r.token_ids) for r in samples)
    rate = line["throughput/rollout_tokens_per_second"].value
    assert rate == pytest.approx(tokens / line["time/rollout_seconds"].value)


def test_a_loop_of_ones_own_chooses_as_train_does() -> None:
    driven, own = trainer(num_steps=1), trainer(num_steps=1)
    outcome = driven.run_step(prompts=[r.prompt for r in driven.generate(PROMPTS)[::5]])
    samples = own.generate(PROMPTS)
    line = own.step(PROMPTS, samples, lengths([], [r.text for r in samples], []))
    assert line["score/mean"] == driven.metrics(outcome)["score/mean"].value
    for one, other in zip(driven.policy.model.parameters(), own.policy.model.parameters(), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(DataError, match="among 5 responses to each prompt"):
        own.step(PROMPTS, [*samples[:2], *samples[5:7], *samples[10:12]], [0.0] * 6)


def test_the_best_may_be_equal_while_the_source_is_alive_and_a_dead_one_still_stops_the_run() -> None:
    guards = {"max_constant_reward_steps": 2}

    def mostly_right(prompts: Any, responses: Sequence[str], metadata: Any) -> list[float]:
        return [float(index % 5 > 0) for index, _ in enumerate(responses)]

    alive = trainer(mostly_right, guards=guards)
    history = alive.train(PROMPTS)
    assert {line["score/mean"] for line in history} == {1.0}
    calls = iter(range(4))

    def all_right_now_and_then(prompts: Any, responses: Sequence[str], metadata: Any) -> list[float]:
        all_right = next(calls) % 2
        return [float(all_right or index % 5 > 0) for index, _ in enumerate(responses)]

    assert len(trainer(all_right_now_and_then, guards=guards).train(PROMPTS)) == 4
    dead = trainer(lambda prompts, responses, metadata: [1.0] * len(responses), guards=guards)
    with pytest.raises(TrainingError, match="all scores of 2 steps"):
        dead.train(PROMPTS)


def test_too_many_samples_that_could_not_be_scored_stop_the_run_though_the_kept_ones_could() -> None:
    def flaky(prompts: Any, responses: Sequence[str], metadata: Any) -> list[float | None]:
        return [1.0 if index % 5 > 2 else None for index, _ in enumerate(responses)]

    with pytest.raises(TrainingError, match="9 of 15 responses could not be scored"):
        trainer(flaky).train(PROMPTS)
