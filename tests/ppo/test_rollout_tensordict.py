"""A rollout in torchrl's layout, with the real package: shapes, states, one end per episode, rewards that add up."""

from dataclasses import replace

import pytest
import torch

from builders import tiny_language_model, tiny_tokenizer
from proximo.config.ppo.options import PPOConfig
from proximo.errors import DataError, MissingExtraError
from proximo.ppo.rollout_tensordict import rollout_tensordict
from proximo.ppo.trainer import PPOTrainer
from proximo.records import Fork, Scored

PROMPTS = [[7, 8, 9], [10], [11, 12]]
ANSWERS = [[20, 2], [21, 22, 23], [24]]
PAD = 63


def experience(answers=ANSWERS, scores=(1.0, 2.0, 3.0), masks=None, **options):
    config = PPOConfig(num_steps=1, prompts_per_step=3, **options)
    made = PPOTrainer(tiny_language_model(), tiny_tokenizer(), reference=tiny_language_model(seed=4), config=config)
    records = made._adopt(PROMPTS[: len(answers)], answers, masks)
    return made.run_step(scored=[Scored(response=r, score=s) for r, s in zip(records, scores, strict=True)]).experience


@pytest.fixture
def tensordict():
    return pytest.importorskip("tensordict", reason="the extra tensordict is not installed")


def test_actions_and_log_probs_are_those_of_the_responses(tensordict) -> None:
    made = experience()
    rollout = rollout_tensordict(made, pad_token_id=PAD)
    assert isinstance(rollout, tensordict.TensorDict)
    assert (rollout.batch_size, rollout.names) == (torch.Size([3, 3]), [None, "time"])
    assert rollout["action"].tolist() == [[20, 2, 0], [21, 22, 23], [24, 0, 0]]
    assert rollout["mask"].tolist() == [[True, True, False], [True, True, True], [True, False, False]]
    assert rollout["sample_log_prob"].shape == (3, 3)
    for name, flat in (("sample_log_prob", made.old_logprobs), ("reference_log_prob", made.reference_logprobs)):
        assert flat is not None
        assert torch.equal(rollout[name][rollout["mask"]], flat)
    for name, flat in (("advantage", made.advantages), ("value_target", made.returns)):
        assert flat is not None
        assert torch.equal(rollout[name][..., 0][rollout["mask"]], flat)
        assert rollout[name].shape == (3, 3, 1)


def test_each_state_is_the_prompt_with_what_was_written_before_the_action(tensordict) -> None:
    rollout = rollout_tensordict(experience(), pad_token_id=PAD)
    assert rollout["input_ids"][0, :2].tolist() == [[7, 8, 9, PAD, PAD], [7, 8, 9, 20, PAD]]
    assert rollout["next", "input_ids"][0, :2].tolist() == [[7, 8, 9, 20, PAD], [7, 8, 9, 20, 2]]
    for row, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
        for step in range(3):
            for state, count in ((rollout, step), (rollout["next"], step + 1)):
                seen = state["input_ids"][row, step][state["attention_mask"][row, step]].tolist()
                assert seen == ([*prompt, *answer[:count]] if step < len(answer) else [])


def test_every_episode_is_done_once_and_knows_whether_it_was_cut(tensordict) -> None:
    following = rollout_tensordict(experience(), pad_token_id=PAD)["next"]
    assert following["done"][..., 0].tolist() == [[False, True, False], [False, False, True], [True, False, False]]
    assert following["terminated"][..., 0].sum(1).tolist() == [1, 0, 0]
    assert following["truncated"][..., 0].sum(1).tolist() == [0, 1, 1]
    assert torch.equal(following["terminated"] | following["truncated"], following["done"])


def test_answers_of_three_five_and_one_tokens_end_once_each(tensordict) -> None:
    """torchrl marks the last of five steps as well, whether or not the answer ended before."""
    following = rollout_tensordict(experience([[20, 21, 2], [20, 21, 22, 23, 2], [2]]), pad_token_id=PAD)["next"]
    assert following["done"][..., 0].int().tolist() == [[0, 0, 1, 0, 0], [0, 0, 0, 0, 1], [1, 0, 0, 0, 0]]


def test_rewards_are_score_and_kl_penalty(tensordict) -> None:
    made = experience(kl={"coefficient": 0.3})
    rollout = rollout_tensordict(made, pad_token_id=PAD)
    following, mask = rollout["next"], rollout["mask"]
    assert following["reward_raw"][..., 0].tolist() == [[0, 1, 0], [0, 0, 2], [3, 0, 0]]
    expected = -0.3 * (rollout["sample_log_prob"] - rollout["reference_log_prob"])
    assert torch.allclose(following["reward_kl"][..., 0], torch.where(mask, expected, 0.0), atol=1e-6)
    assert torch.allclose(following["reward"], following["reward_raw"] + following["reward_kl"])
    assert torch.equal(following["reward"][..., 0][mask], made.rewards)


def test_tokens_and_responses_that_do_not_count_are_masked_and_empty_ones_are_left_out(tensordict) -> None:
    made = experience([[20, 21, 2], [], [24]], (1.0, 2.0, float("nan")), [[1, 1, 0], [], [0]], kl="none")
    rollout = rollout_tensordict(made, pad_token_id=PAD)
    assert rollout["action"].tolist() == [[20, 21, 2], [24, 0, 0]]
    assert rollout["mask"].tolist() == [[True, True, False], [False, False, False]]
    assert rollout["next", "reward_raw"][..., 0].tolist() == [[0, 1, 0], [0, 0, 0]]
    assert "reference_log_prob" not in rollout.keys()  # noqa: SIM118  (a TensorDict is not a dict)
    assert not torch.isnan(rollout["next", "reward"]).any()


def test_a_trajectory_with_a_fork_is_refused(tensordict) -> None:
    made = experience()
    first = made.scored[0]
    forked = replace(first, response=replace(first.response, forks=(Fork(start=1, context=(5, 6)),)))
    with pytest.raises(DataError, match="after a fork"):
        rollout_tensordict(replace(made, scored=(forked, *made.scored[1:])), pad_token_id=0)


def test_without_the_package_its_extra_is_named(monkeypatch) -> None:
    monkeypatch.setattr("proximo.ppo.rollout_tensordict.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'proximo\[tensordict\]'"):
        rollout_tensordict(experience(), pad_token_id=PAD)


def test_a_step_without_a_token_is_no_rollout(monkeypatch) -> None:
    monkeypatch.setattr("proximo.ppo.rollout_tensordict.find_spec", lambda name: object())
    from proximo.records import Experience
    from records_made import response

    nothing = torch.zeros(0)
    empty = Experience(
        scored=(Scored(response=response([]), score=1.0),),
        lengths=(0,),
        mask=nothing.bool(),
        old_logprobs=nothing,
        reference_logprobs=None,
        values=None,
        rewards=nothing,
        advantages=nothing,
        returns=None,
    )
    with pytest.raises(DataError, match="no response has a token"):
        rollout_tensordict(empty, pad_token_id=PAD)
