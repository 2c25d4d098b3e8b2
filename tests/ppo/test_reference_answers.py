"""The score of a response beside that of the prompt's reference answer, from the same source."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from builders import tiny_language_model, tiny_tokenizer
from proximo.config.ppo.options import PPOConfig
from proximo.data.formats.prompt_response import Exchange, assistant_turn, user_turn
from proximo.data.rendering import encode_exchanges
from proximo.data.tokenise import TextEncoder
from proximo.errors import ConfigError, DataError, TrainingError
from proximo.models.language import LanguageModel
from proximo.models.pretrained.saving import save_pretrained
from proximo.models.scalar import HeadStart, scalar_from_language_model
from proximo.ppo.from_recipe import build_task
from proximo.ppo.recipe import PPORecipe
from proximo.ppo.roles.policy import sampling_options
from proximo.ppo.roles.worker import answer_responses
from proximo.ppo.trainer import PPOTrainer
from proximo.records import Finish, Prompt
from proximo.rewards.function import FunctionReward
from proximo.rewards.model import ModelReward
from proximo.rollout.sampling import RandomKey
from records_made import prompt, response, scored

ANSWERED = [prompt("p0", answer="abc"), prompt("p1", text="cd", answer="e")]


def trainer(reward: Any = None) -> PPOTrainer:
    config = PPOConfig(
        num_steps=1,
        prompts_per_step=2,
        responses_per_prompt=2,
        rollout={"max_new_tokens": 4},
        kl="none",
        score={"minus_reference_answer": True},
    )
    return PPOTrainer(tiny_language_model(), tiny_tokenizer(), reward=reward, config=config)


class Lengths:
    """Scores a text by its length, fails for some, and remembers what it was asked."""

    def __init__(self, *, unable: Sequence[str] = ()) -> None:
        self.unable = unable
        self.asked: list[list[str]] = []
        self.metadata: list[Mapping[str, Any]] = []

    def __call__(self, prompts: Any, responses: list[str], metadata: list[Mapping[str, Any]]) -> list[float | None]:
        self.asked.append(responses)
        self.metadata += metadata
        return [None if text in self.unable else float(len(text)) for text in responses]


def test_answers_are_responses_that_ended_in_the_tokens_that_fine_tuning_sees() -> None:
    tokenizer = tiny_tokenizer()
    chat = Prompt(id="chat", token_ids=(5,), messages=user_turn("cd"), answer="ef")
    bare = Prompt(id="bare", token_ids=(5, 6), answer="abc")
    found = answer_responses([*ANSWERED, chat, bare], tokenizer)
    exchanges = [
        Exchange(origin="", prompt="hi", responses=("abc",)),
        Exchange(origin="", prompt="cd", responses=("e",)),
        Exchange(origin="", prompt=user_turn("cd"), responses=(assistant_turn("ef"),)),
        Exchange(origin="", prompt="", responses=("abc",)),
    ]
    _, encoded = encode_exchanges(TextEncoder(tokenizer), exchanges)
    assert [each.token_ids for each in found] == [each.responses[0].ids for each in encoded]
    assert [each.text for each in found] == ["abc", "e", "ef", "abc"]
    assert all(each.finish is Finish.EOS and each.response_mask.all() for each in found)
    assert found[3].prompt is bare


def test_the_source_is_asked_once_for_each_prompt_of_the_batch() -> None:
    source = Lengths()
    reward = trainer(FunctionReward(source)).roles.reward
    batch = [scored(9.0, of=response(to=ANSWERED[place])) for place in (0, 0, 1, 0, 1)]
    found = reward.with_answer_scores(batch, answer_responses(ANSWERED, tiny_tokenizer()))
    assert source.asked == [["abc", "e"]]
    assert [facts["finish"] for facts in source.metadata] == ["eos", "eos"]
    assert [each.answer_score for each in found] == [3.0, 3.0, 1.0, 3.0, 1.0]
    assert [each.score for each in found] == [9.0] * 5


def test_without_the_answers_score_a_response_counts_as_not_scored() -> None:
    reward = trainer(FunctionReward(Lengths(unable=["e"]))).roles.reward
    batch = [scored(9.0, of=response(to=each)) for each in ANSWERED]
    found = reward.with_answer_scores(batch, answer_responses(ANSWERED, tiny_tokenizer()))
    assert [each.valid for each in found] == [True, False]
    assert "answer that it is compared with was not scored" in str(found[1].reason)
    with pytest.raises(TrainingError, match="4 of 4 responses could not be scored"):
        trainer().train(ANSWERED, reward=Lengths(unable=["abc", "e"]))


def test_a_reward_model_reads_prompt_and_answer_as_one_text() -> None:
    scalar = scalar_from_language_model(LanguageModel(tiny_language_model(seed=1)), HeadStart.NORMAL, seed=2)
    reward = trainer(ModelReward(scalar)).roles.reward
    (answer,) = answer_responses(ANSWERED[:1], tiny_tokenizer())
    (found,) = reward.with_answer_scores([scored(of=response(to=ANSWERED[0]))], [answer])
    ids = torch.tensor([[*ANSWERED[0].token_ids, *answer.token_ids]])
    scalar.model.set_attn_implementation("sdpa")
    assert found.answer_score == pytest.approx(scalar.model(ids).logits.item(), abs=1e-5)


def test_the_policy_is_rewarded_with_the_difference() -> None:
    seen = []
    made = trainer()
    outcome_of = made.run_step
    made.run_step = lambda **given: seen.append(outcome_of(**given)) or seen[-1]
    (line,) = made.train(ANSWERED, reward=Lengths())
    experience = seen[0].experience
    totals = [part.sum().item() for part in experience.rewards.split(list(experience.lengths))]
    wanted = [len(each.response.text) - len(str(each.response.prompt.answer)) for each in experience.scored]
    assert totals == wanted
    assert line["score/answer_mean"] == 2.0
    assert line["score/mean"] == line["score/shaped_mean"] + 2.0


def test_with_a_greedy_baseline_the_policy_is_rewarded_with_the_difference_to_its_most_likely_answer() -> None:
    """ReMax: score minus that of the greedy response, for every token, neither centred nor standardised."""
    config = PPOConfig(
        num_steps=1,
        prompts_per_step=2,
        responses_per_prompt=2,
        rollout={"max_new_tokens": 4},
        kl="none",
        advantage="greedy_baseline",
    )
    made = PPOTrainer(tiny_language_model(), tiny_tokenizer(), config=config)
    options = sampling_options(config, greedy=True)
    key = RandomKey(seed=77, purpose="rollout", step=0)
    greedy = made.roles.policy.engine.generate(ANSWERED, num_samples=2, options=options, key=key)
    best = {each.prompt.id: len(each.text) for each in greedy}
    seen, calls = [], []
    run_step, generate = made.run_step, made.roles.policy.engine.generate

    def counting(prompts: Any, **options: Any) -> Any:
        calls.append((options["num_samples"], options["options"].greedy))
        return generate(prompts, **options)

    made.roles.policy.engine.generate = counting  # type: ignore[method-assign]
    made.run_step = lambda **given: seen.append(run_step(**given)) or seen[-1]
    (line,) = made.train(ANSWERED, reward=Lengths())
    assert sorted(calls) == [(1, True), (2, False)]
    experience = seen[0].experience
    for each, part in zip(experience.scored, experience.advantages.split(list(experience.lengths)), strict=True):
        assert part.tolist() == [len(each.response.text) - best[each.response.prompt.id]] * len(part)
    assert any(experience.advantages)
    assert line["score/answer_mean"] == sum(best.values()) / 2
    assert "value/loss" not in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"advantage": "greedy_baseline"}, "advantage greedy_baseline subtracts .* greedy answer"),
        ({"score": {"minus_reference_answer": True}}, "score.minus_reference_answer subtracts .* reference answer"),
    ],
)
def test_scores_that_are_brought_have_no_answer_beside_them(options: dict[str, Any], message: str) -> None:
    config = PPOConfig(prompts_per_step=2, rollout={"max_new_tokens": 4}, **options)
    made = PPOTrainer(tiny_language_model(), tiny_tokenizer(), config=config)
    with pytest.raises(ValueError, match=message):
        made.step(ANSWERED, made.generate(ANSWERED), [1.0, 2.0])


def test_a_prompt_without_an_answer_is_named_before_anything_is_sampled() -> None:
    with pytest.raises(DataError, match="1 of 3 have none, first of them prompt 'p2'"):
        trainer().train([*ANSWERED, prompt("p2")], reward=Lengths())


def test_scores_that_the_caller_brings_are_refused() -> None:
    made = trainer()
    with pytest.raises(ValueError, match="remove the option"):
        made.step(["ab"], [[7, 8, 2]], [1.0])


def recipe(rows: list[dict[str, str]]) -> PPORecipe:
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PPORecipe.model_validate(
        {
            "run": {"folder": "run", "device": "cpu"},
            "model": {"path": "model"},
            "data": {"sources": [{"path": "prompts.jsonl"}]},
            "reward": [{"kind": "model", "path": "scorer"}],
            "value": {"init_from": "policy"},
            "ppo": {
                "num_steps": 1,
                "prompts_per_step": 2,
                "rollout": {"max_new_tokens": 2},
                "score": {"minus_reference_answer": True},
            },
        }
    )


def test_a_run_says_before_training_what_its_answers_lack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer, or room in the positions of the reward model: 11, of which the prompt takes 6."""
    monkeypatch.chdir(tmp_path)
    short = tiny_language_model(max_position_embeddings=11)
    save_pretrained(tiny_language_model(), Path("model"))
    save_pretrained(scalar_from_language_model(LanguageModel(short), HeadStart.NORMAL).model, Path("scorer"))
    for name in ("model", "scorer"):
        tiny_tokenizer().save_pretrained(name)
    row = {"prompt": "abcdef", "answer": "abcd"}
    build_task(recipe([row, row]))
    with pytest.raises(DataError, match="1 of 2 have none"):
        build_task(recipe([row, {"prompt": "abcdef"}]))
    with pytest.raises(ConfigError, match=r"6 tokens and .* 6 make 12, but the reward_model model .* at most 11"):
        build_task(recipe([row, {**row, "answer": "abcde"}]))
