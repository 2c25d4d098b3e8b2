"""Rewards of single tokens, from a function, a reward model or a loop of one's own, on their way to the rewards."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from builders import tiny_language_model, tiny_tokenizer
from proximo.config.ppo.options import PPOConfig
from proximo.errors import ConfigError, TrainingError
from proximo.models.language import LanguageModel
from proximo.models.packing import pack
from proximo.models.scalar import HeadStart, scalar_from_language_model
from proximo.ppo.recipe import PPORecipe
from proximo.ppo.step import experience_of
from proximo.ppo.train_state import TrainState
from proximo.ppo.trainer import PPOTrainer
from proximo.records import Experience, Finish, Passes, Response, Scored, ScoreState
from proximo.rewards.function import FunctionReward
from proximo.rewards.model import ModelReward
from proximo.rewards.source import scored_by_prefix, scored_by_token
from proximo.rewards.weighted import WeightedReward
from records_made import prompt, response, scored

CLOSE = {"rtol": 0, "atol": 1e-6}


def graded(grade: Any, of: Response | None = None) -> Scored:
    (found,) = FunctionReward(lambda prompts, responses, metadata: [grade]).score([of or response()])
    return found


def rewards(batch: list[Scored], **options: Any) -> torch.Tensor:
    return made(batch, **options).rewards


def made(batch: list[Scored], *, reference: list[float] | None = None, **options: Any) -> Experience:
    """At values of 0 and a KL coefficient of 1."""
    old = torch.cat([each.response.logprobs for each in batch])
    values = torch.zeros(len(old) + len(batch))
    against = None if reference is None else torch.tensor(reference)
    kl = {"kind": "none" if reference is None else "reward"}
    base = {"advantage": {"standardise": False, "gae_lambda": 1.0}, "kl": kl, "rollout": {"max_new_tokens": 3}}
    passes = Passes(old_logprobs=old, reference_logprobs=against, values=values)
    return experience_of(batch, passes, TrainState(kl_coefficient=1.0), config=PPOConfig(**(base | options)))[0]


@pytest.mark.parametrize(
    "given", [[0.5, 0.0, -1.0], {0: 0.5, 2: -1}, np.array([0.5, 0.0, -1.0]), torch.tensor([0.5, 0.0, -1.0])]
)
def test_a_function_rewards_tokens_in_a_list_or_by_index_and_the_score_is_their_sum(given: Any) -> None:
    found = graded({"token_rewards": given, "steps": 2})
    assert found.token_rewards == (0.5, 0.0, -1.0)
    assert found.score == -0.5
    assert found.components == {"steps": 2.0}


def test_a_function_is_told_the_tokens() -> None:
    source = FunctionReward(
        lambda prompts, responses, metadata: [
            {"token_rewards": [float(t) for t in each["token_ids"]]} for each in metadata
        ]
    )
    (found,) = source.score([response([7, 8, 2])])
    assert found.token_rewards == (7.0, 8.0, 2.0)


@pytest.mark.parametrize("given", [[1.0], [1.0] * 4, {3: 1.0}, {-1: 1.0}, {"x": 1.0}, "abc", 1.0, [[1.0]] * 3])
def test_rewards_that_do_not_fit_the_tokens_stop_the_run(given: Any) -> None:
    with pytest.raises(TrainingError, match="one number for each of the 3 tokens"):
        graded({"token_rewards": given})


@pytest.mark.parametrize("grade", [{"score": 1.0, "token_rewards": [0.0] * 3}, {"steps": 1.0}])
def test_a_mapping_has_a_score_or_token_rewards_and_not_both(grade: dict) -> None:
    with pytest.raises(TrainingError, match="either 'score' or 'token_rewards'"):
        graded(grade)


@pytest.mark.parametrize("given", [[1.0, None, 1.0], {0: math.nan}, [math.inf] * 3])
def test_a_token_without_a_number_leaves_the_response_without_a_score(given: Any) -> None:
    assert graded({"token_rewards": given}).state is ScoreState.INFRASTRUCTURE_FAULT


def test_an_empty_response_has_nothing_to_reward() -> None:
    assert graded({"token_rewards": []}, response([])).score == 0


def test_each_token_gets_its_reward_minus_the_kl_and_the_advantage_looks_ahead() -> None:
    found = made([graded({"token_rewards": [1.0, 0.0, 2.0]})], reference=[-1.5, -1.0, -0.5])
    torch.testing.assert_close(found.rewards, torch.tensor([0.5, 0.0, 2.5]), **CLOSE)
    torch.testing.assert_close(found.advantages, torch.tensor([3.0, 2.5, 2.5]), **CLOSE)


def test_responses_with_and_without_token_rewards_may_share_a_batch() -> None:
    found = rewards([graded({"token_rewards": [1.0, 0.0, 2.0]}), scored(5.0)])
    torch.testing.assert_close(found, torch.tensor([1.0, 0.0, 2.0, 0.0, 0.0, 5.0]), **CLOSE)


def test_the_rewards_of_a_response_sum_to_its_score_whatever_is_made_of_it() -> None:
    """What multiplies the score multiplies its parts; what else is done to it shows on the last token."""
    batch = [graded({"token_rewards": [1.0, 0.0, 2.0]})]
    scaled = rewards(batch, score={"scale": 0.5, "bias": 4.0})
    torch.testing.assert_close(scaled, torch.tensor([0.5, 0.0, 1.0 + 2.0]), **CLOSE)
    short = {"min_tokens": 3, "min_tokens_penalty": 0.25}
    cut = [graded({"token_rewards": [1.0, 2.0]}, response([7, 2]))]
    torch.testing.assert_close(rewards(cut, score=short), torch.tensor([1.0, 1.75]), **CLOSE)
    replaced = rewards(cut, score=short | {"penalty_mode": "replace"})
    torch.testing.assert_close(replaced, torch.tensor([0.0, -0.25]), **CLOSE)


def test_a_clip_is_of_each_number_and_not_of_their_sum() -> None:
    """200 tokens worth 0.5 stay so under a limit of 20; what they leave of the score is clipped by itself."""
    many = response([7] * 200)
    found = rewards([graded({"token_rewards": [0.5] * 200}, many)], score={"clip": 20.0})
    torch.testing.assert_close(found, torch.full((200,), 0.5), **CLOSE)
    cut = rewards([graded({"token_rewards": [3.0, -1.0, -9.0]})], score={"clip": 2.0})
    torch.testing.assert_close(cut, torch.tensor([2.0, -1.0, -2.0]), **CLOSE)
    both = replace(graded({"token_rewards": [1.0, 0.0, 3.0]}), score=14.0)  # 10 of it from a source without tokens
    torch.testing.assert_close(rewards([both], score={"clip": 2.0}), torch.tensor([1.0, 0.0, 4.0]), **CLOSE)
    short = rewards([both], score={"clip": 2.0, "min_tokens": 3, "min_tokens_penalty": 5.0, "scale": 0.5})
    torch.testing.assert_close(short, torch.tensor([0.5, 0.0, 3.5]), **CLOSE)


def graded_by_prefix(*prefix_scores: float) -> Scored:
    return scored_by_prefix(response(), prefix_scores, name="model")


def test_what_tokens_add_begins_at_what_the_prompt_is_worth_and_the_score_is_that_of_the_whole() -> None:
    found = graded_by_prefix(0.5, 0.75, 0.25, 3.0)
    assert found.score == 3.0
    torch.testing.assert_close(rewards([found]), torch.tensor([0.25, -0.5, 2.75]), **CLOSE)
    # The scores are clipped, then subtracted: 0.5, 0.75, 0.25 and 1.
    torch.testing.assert_close(rewards([found], score={"clip": 1.0}), torch.tensor([0.25, -0.5, 0.75]), **CLOSE)
    # A bias is added to the score of the response, and to it alone.
    shifted = rewards([found], score={"scale": 2.0, "bias": 1.0})
    torch.testing.assert_close(shifted, torch.tensor([0.5, -1.0, 5.5 + 2.0]), **CLOSE)


def test_of_several_sources_prefixes_and_parts_stay_apart() -> None:
    class Fixed:
        def __init__(self, name: str, found: Scored) -> None:
            self.name, self.found = name, found

        def score(self, responses: Any) -> list[Scored]:
            return [self.found]

    sources = [Fixed("model", graded_by_prefix(0.5, 1.0, 1.0, 3.0)), Fixed("steps", graded({"token_rewards": {1: 3}}))]
    (found,) = WeightedReward([(2.0, sources[0]), (1.0, sources[1])]).score([response()])
    assert (found.score, found.prefix_scores) == (9.0, (1.0, 2.0, 2.0, 6.0))
    torch.testing.assert_close(rewards([found]), torch.tensor([1.0, 3.0, 4.0]), **CLOSE)
    torch.testing.assert_close(rewards([found], score={"clip": 2.5}), torch.tensor([1.0, 2.5, 0.5]), **CLOSE)


def test_a_prefix_without_a_number_leaves_the_response_without_a_score() -> None:
    assert graded_by_prefix(0.5, math.nan, 1.0, 3.0).state is ScoreState.INFRASTRUCTURE_FAULT


def test_running_moments_divide_the_parts_too() -> None:
    batch = [graded({"token_rewards": [1.0, 0.0, 2.0]}), graded({"token_rewards": [0.0, 0.0, 1.0]})]
    found = rewards(batch, score={"normalise": "scale"})
    torch.testing.assert_close(found, torch.tensor([1.0, 0.0, 2.0, 0.0, 0.0, 1.0]) / math.sqrt(2), **CLOSE)


def test_a_cut_response_without_a_score_has_no_part_of_it_either() -> None:
    cut = graded({"token_rewards": [1.0, 0.0, 2.0]}, response(finish=Finish.LENGTH))
    assert rewards([cut], truncation="unscored").tolist() == [0.0] * 3


def test_what_a_tool_wrote_earns_nothing_and_its_share_moves_to_the_last_token_of_the_policy() -> None:
    between = response([7, 8, 2], mask=[True, False, True])
    found = rewards([graded({"token_rewards": [1.0, 5.0, 2.0]}, between)])
    torch.testing.assert_close(found, torch.tensor([1.0, 0.0, 7.0]), **CLOSE)


def test_of_several_sources_the_parts_add_up_and_a_plain_score_stays_on_the_last_token() -> None:
    first = FunctionReward(lambda prompts, responses, metadata: [{"token_rewards": [1.0, 0.0, 2.0]}], name="steps")
    second = FunctionReward(lambda prompts, responses, metadata: [{"token_rewards": {1: 1.0}}], name="more")
    third = FunctionReward(lambda prompts, responses, metadata: [10.0], name="outcome")
    (found,) = WeightedReward([(2.0, first), (3.0, second), (0.5, third)]).score([response()])
    assert found.score == 14.0
    assert found.token_rewards == (2.0, 3.0, 4.0)
    assert found.components == {"steps": 3.0, "more": 1.0, "outcome": 10.0}
    torch.testing.assert_close(rewards([found]), torch.tensor([2.0, 3.0, 9.0]), **CLOSE)


@pytest.mark.parametrize("estimator", ["group_centred", "group_standardised", "leave_one_out"])
def test_estimators_that_verifier_a_response_as_a_whole_refuse_them(estimator: str) -> None:
    batch = [graded({"token_rewards": [1.0, 0.0, 2.0]}), scored(5.0)]
    with pytest.raises(ConfigError, match=f"{estimator} uses one advantage per response"):
        rewards(batch, advantage=estimator, responses_per_prompt=2)


@torch.no_grad()
@pytest.mark.parametrize("dense", ["deltas", "absolute"])
def test_a_reward_model_is_read_after_every_token_in_one_pass(dense: str) -> None:
    model = scalar_from_language_model(LanguageModel(tiny_language_model()), HeadStart.NORMAL, seed=3)
    responses = [response([7, 8, 2], to=prompt()), response([9], to=prompt("p1", token_ids=(5,))), response([])]
    found = ModelReward(model, dense=dense, tokens_per_microbatch=6).score(responses)
    plain = ModelReward(model).score(responses)
    for one, sparse in zip(found, plain, strict=True):
        ids, asked = one.response.token_ids, one.response.prompt.token_ids
        prefixes = [float(model.sequence_scores(pack([(*asked, *ids[: t + 1])]))) for t in range(len(ids))]
        if dense == "deltas" and ids:
            start = float(model.sequence_scores(pack([asked])))
            assert one.prefix_scores == pytest.approx((start, *prefixes), abs=1e-5)
        else:
            assert (one.token_rewards or ()) == pytest.approx(tuple(prefixes), abs=1e-5)
        if dense == "deltas" or not ids:
            assert one.score == pytest.approx(sparse.score, abs=1e-5)
        else:
            assert one.score == pytest.approx(sum(prefixes), abs=1e-5)


def test_tokens_of_another_tokenizer_are_refused() -> None:
    model = scalar_from_language_model(LanguageModel(tiny_language_model()), HeadStart.NORMAL)
    with pytest.raises(ConfigError, match="its own tokenizer"):
        ModelReward(model, tokenizer=tiny_tokenizer(), dense="deltas")


def test_a_recipe_whose_estimator_has_no_use_for_them_is_refused() -> None:
    recipe = {
        "run": {"folder": "run"},
        "model": {"path": "model"},
        "data": {"sources": [{"path": "prompts.jsonl"}]},
        "reward": [{"kind": "model", "path": "scorer", "dense": "deltas"}],
        "ppo": {"advantage": "return_to_go"},
    }
    PPORecipe.model_validate(recipe)
    recipe["ppo"] = {"advantage": "leave_one_out", "responses_per_prompt": 2}
    with pytest.raises(ValueError, match="reward_model has token-level rewards"):
        PPORecipe.model_validate(recipe)


def test_a_loop_of_ones_own_may_bring_rewards_of_tokens() -> None:
    config = PPOConfig(num_steps=1, prompts_per_step=2, rollout={"max_new_tokens": 4}, kl="none")
    trainer = PPOTrainer(tiny_language_model(), tiny_tokenizer(), config=config)
    responses = trainer.generate(["ab", "c"])
    line = trainer.step(["ab", "c"], responses, [[1.0] * len(responses[0].token_ids), 3.0])
    assert line["score/mean"] == pytest.approx((len(responses[0].token_ids) + 3.0) / 2)
    assert scored_by_token(responses[0], {0: 2.0}, name="scores").score == 2.0
