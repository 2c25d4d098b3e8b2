"""The loop that users of step(queries, responses, scores) know: tensors of ids, masks, their own data loader."""

import copy
import math
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader

from ppo_trainers import LARGE, all_weights, ppo_trainer
from proximo.errors import DataError
from proximo.ppo.trainer import PPOTrainer
from proximo.records import Scored

IDS = [[7, 8, 9], [10, 11], [12, 13, 14, 15], [6]]


trainer = partial(ppo_trainer, value_optimizer=LARGE)


def test_tensors_do_what_lists_do() -> None:
    lists, tensors = trainer(), trainer()
    from_lists = lists.step(IDS, [[20, 21, 2], [22], [23, 24], [25, 2]], [1.0, None, 0.5, -1.0])
    queries = [torch.tensor(ids) for ids in IDS]
    answers = [torch.tensor(ids) for ids in ([20, 21, 2], [22], [23, 24], [25, 2])]
    scores = [torch.tensor(1.0), torch.tensor([math.nan]), torch.tensor(0.5), torch.tensor(-1.0)]
    from_tensors = tensors.step(queries, answers, scores)
    assert torch.equal(all_weights(lists.policy.model), all_weights(tensors.policy.model))
    assert from_lists["score/mean"] == from_tensors["score/mean"] == pytest.approx(0.5 / 3)
    assert trainer().step(queries, answers, torch.tensor([1.0, math.nan, 0.5, -1.0]))["response/unscored"] == 1


def test_generate_takes_ids_as_it_takes_their_text() -> None:
    made = trainer()
    texts = [made.tokenizer.decode(ids) for ids in IDS]
    from_text = made.generate(texts)
    from_ids = made.generate([torch.tensor(ids) for ids in IDS])
    assert [r.token_ids for r in from_ids] == [r.token_ids for r in from_text]
    assert [r.prompt.text for r in from_ids] == texts


@torch.no_grad()
def test_what_generate_of_transformers_samples_can_be_learned_from() -> None:
    """With arguments that no setting here has: the log-probs are the policy's own, so that the ratio starts at 1."""
    made = trainer()
    twin = copy.deepcopy(made.policy.base, {id(each): each for each in made.policy.base.parameters()})
    twin.set_attn_implementation("sdpa")
    prompts = [torch.tensor(ids) for ids in IDS]
    unusual = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "do_sample": True, "min_p": 0.01}
    responses = []
    for ids in prompts:
        whole = twin.generate(ids[None], attention_mask=torch.ones_like(ids[None]), max_new_tokens=6, **unusual)[0]
        responses.append(whole[len(ids) :])
    with torch.enable_grad():
        line = made.step(prompts, responses, [float(index) for index, _ in enumerate(responses)])
    assert line["first_minibatch/max_abs_log_ratio"] < 1e-4
    assert line["response/tokens_mean"] == sum(map(len, responses)) / 4


def test_a_data_loader_of_ones_own_feeds_it_and_statistics_come_back() -> None:
    rows = [{"input_ids": torch.tensor(ids), "query": str(ids)} for ids in (*IDS, *IDS)]
    loader = DataLoader(
        rows, batch_size=4, collate_fn=lambda batch: {key: [row[key] for row in batch] for key in batch[0]}
    )
    made = trainer()
    for batch in loader:
        responses = made.generate(batch["input_ids"])
        scores = [torch.tensor(float(response.text.count("a"))) for response in responses]
        stats = made.step(batch["input_ids"], responses, scores)
        assert stats["score/mean"] == pytest.approx(sum(map(float, scores)) / 4)
        assert {"kl/sequence", "policy/loss", "value/loss", "policy/clip_fraction"} <= stats.keys()
    assert made.state.steps_done == 2


MASKS = [[1, 0, 0, 1], [True, True], torch.tensor([0, 1, 1]), torch.tensor([False])]
ANSWERS = [[20, 21, 22, 2], [23, 24], [25, 26, 2], [27]]
KEPT = [True, False, False, True, True, True, False, True, True, False]


def masked_experience(made: PPOTrainer, masks=MASKS, answers=ANSWERS):
    records = made._adopt(IDS, answers, masks)
    scored = [Scored(response=r, score=s) for r, s in zip(records, [1.0, 2.0, 3.0, 4.0], strict=True)]
    return made.run_step(scored=scored).experience


def test_masked_tokens_have_no_part_in_mask_rewards_advantages_or_returns() -> None:
    experience = masked_experience(trainer(kl={"coefficient": 0.0}))
    kept = torch.tensor(KEPT)
    assert torch.equal(experience.mask, kept)
    # The score stands once, on the last token that the policy wrote; the response that is all the tool's has none.
    assert experience.rewards.tolist() == [0, 0, 0, 1, 0, 2, 0, 0, 3, 0]
    assert not experience.advantages[~kept].any()
    assert experience.advantages[kept].mean().item() == pytest.approx(0, abs=1e-6)
    assert not experience.returns[~kept].any()


@pytest.mark.parametrize("objective", ["ppo", "gspo", "cispo", "sapo"])
def test_the_loss_and_the_kl_do_not_see_what_was_masked(objective: str) -> None:
    """The last token of an answer, masked, changes nothing: as if the answer had ended before it."""
    # A large eps, since Adam turns a gradient that is all rounding into a whole step.
    optimizer = {"learning_rate": 1e-2, "eps": 1e-2}
    options = {"policy_loss": {"objective": objective}, "policy_optimizer": optimizer, "value_optimizer": optimizer}
    shorter, masked = trainer(**options), trainer(**options)
    first = shorter.step(IDS, [[20, 21], [22], [23, 24], [25]], [1.0, 0.0, 0.5, -1.0])
    masks = [[1, 1, 0], [1, 0], [1, 1], [1, 0, 0]]
    second = masked.step(
        IDS, [[20, 21, 30], [22, 31], [23, 24], [25, 32, 33]], [1.0, 0.0, 0.5, -1.0], response_masks=masks
    )
    assert torch.allclose(all_weights(shorter.policy.model), all_weights(masked.policy.model), atol=1e-6)
    for name in ("kl/sequence", "policy/loss", "value/loss", "policy/entropy"):
        assert second[name] == pytest.approx(first[name], abs=1e-6)
    unmasked = trainer(**options)
    unmasked.step(IDS, [[20, 21, 30], [22, 31], [23, 24], [25, 32, 33]], [1.0, 0.0, 0.5, -1.0])
    assert not torch.allclose(all_weights(shorter.policy.model), all_weights(unmasked.policy.model), atol=1e-4)


def test_an_answer_without_a_token_of_the_policy_is_in_no_baseline() -> None:
    made = trainer(advantage="group_centred", responses_per_prompt=2, kl="none", prompts_per_step=1)
    prompts = [IDS[0]]
    records = made._adopt(prompts, [[20, 2], [21, 2], [22, 23]], [[1, 1], [1, 1], [0, 0]])
    scored = [Scored(response=r, score=s) for r, s in zip(records, [1.0, 2.0, 99.0], strict=True)]
    raw = made.run_step(scored=scored).made.raw_advantages
    assert (raw.mean, raw.num_tokens) == (0.0, 4)
    assert raw.variance == pytest.approx(0.25)


def test_a_mask_joins_the_one_that_a_record_brings() -> None:
    made = trainer()
    responses = made.generate(IDS)
    lengths = [len(r.token_ids) for r in responses]
    once = made._adopt(IDS, responses, [[0] + [1] * (length - 1) for length in lengths])
    twice = made._adopt(IDS, once, [[1] * (length - 1) + [0] for length in lengths])
    assert [r.response_mask.tolist() for r in twice] == [
        [0 < i < length - 1 for i in range(length)] for length in lengths
    ]


BATCH = torch.tensor([[7, 8], [9, 10]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda made: made.generate(BATCH), "got one tensor, which would hold padding"),
        (lambda made: made.generate([BATCH]), "prompt 0 must be a text, a Prompt or its token ids .*got tensor"),
        (lambda made: made.generate([[]]), "its token ids .*, got none"),
        (lambda made: made.generate([torch.tensor([0.5])]), "its token ids"),
        (lambda made: made.generate([[99]]), "it has the token id 99, but the policy has 64"),
        (lambda made: made.step([[7]], [BATCH], [1.0]), "a Response or a list of token ids"),
        (lambda made: made.step([[7]], [[8]], [torch.tensor([1.0, 2.0])]), "a score is one number"),
        (lambda made: made.step([[7]], [[8]], ["1"]), "a score is one number"),
        (lambda made: made.step([[7]], [[8]], 1.0), "scores must be a list"),
        (lambda made: made.step([[7]], [[8]], [1.0], response_masks=[]), "got 0 for 1 response"),
        (lambda made: made.step([[7]], [[8]], [1.0], response_masks=[[1, 1]]), "response 0 has 1 tokens, its mask"),
        (lambda made: made.step([[7]], [[8]], [1.0], response_masks=[[0.5]]), "one True or False"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_learned(call, message: str) -> None:
    made = trainer()
    with pytest.raises(DataError, match=message):
        call(made)
    assert made.state.steps_done == 0
