"""The steps of responses judged by a process reward model: what it reads, what is made of it, and where it goes."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from builders import tiny_language_model, tiny_tokenizer
from proximo.config.rewards.sources import ModelRewardConfig, PRMRewardConfig
from proximo.data.rows import Row
from proximo.data.step_examples import StepOptions, load_step_examples
from proximo.errors import ConfigError, DataError
from proximo.models.language import LanguageModel
from proximo.models.packing import pack
from proximo.models.precision.placement import Precision
from proximo.models.pretrained.saving import save_pretrained
from proximo.models.scalar import HeadStart, ScalarModel, mark_steps, scalar_from_language_model
from proximo.ppo.recipe import PPORecipe
from proximo.records import Finish, Prompt, Response, Scored, ScoreState
from proximo.rewards.prm import ProcessReward
from proximo.run.make.models import DeviceSpec, build_reward_source, reward_model_config
from records_made import response
from rewards.test_model_reward import other_tokenizer
from tiny_runs import changed, make_inputs, recipe_of

ASKED = Prompt(id="p", token_ids=(6, 7), text="ab")
MESSAGES = ({"role": "user", "content": "ab"},)


def step_model(seed: int = 0) -> ScalarModel:
    model = scalar_from_language_model(LanguageModel(tiny_language_model(seed=seed)), HeadStart.NORMAL, seed=seed)
    mark_steps(model, "\n")
    return model


def said(text: str, *, to: Prompt = ASKED, finish: Finish = Finish.EOS, tokenizer: Any = None) -> Response:
    ids = (tokenizer or tiny_tokenizer())(text, add_special_tokens=False)["input_ids"]
    return response([*ids, *([2] if finish is Finish.EOS else [])], to=to, finish=finish, text=text)


def judge(model: ScalarModel | None = None, **options: Any) -> ProcessReward:
    defaults = {"policy_tokenizer": tiny_tokenizer()}
    return ProcessReward(model or step_model(), tiny_tokenizer(), **(defaults | options))


class Fixed(ProcessReward):
    """Judges steps as it is told, whatever they are."""

    given: tuple[float, ...] = (0.8, 0.5, 0.9)

    def _scores_of(self, readings: Any) -> list[list[float]]:
        scores = torch.tensor(self.given, dtype=torch.float64).logit().tolist()
        return [scores[: len(reading.places)] if reading else [] for reading in readings]


def fixed(text: str, **options: Any) -> Scored:
    source = Fixed(step_model(), tiny_tokenizer(), policy_tokenizer=tiny_tokenizer(), **options)
    return source.score([said(text)])[0]


@pytest.mark.parametrize(("aggregate", "score"), [("min", 0.5), ("product", 0.36), ("last", 0.9), ("mean", 2.2 / 3)])
def test_the_score_of_a_response_is_an_aggregate_of_its_steps(aggregate: Any, score: float) -> None:
    """By hand, of steps with the probabilities 0.8, 0.5 and 0.9."""
    found = fixed("c\nd\ne", aggregate=aggregate)
    assert found.score == pytest.approx(score, abs=1e-12)
    assert found.components == pytest.approx({"solution": score, "steps": 3.0, "right_steps": 3.0})
    assert found.token_rewards is None


@pytest.mark.parametrize(
    ("options", "rewards", "score"),
    [
        ({"dense": "deltas"}, {1: 0.8, 4: -0.3, 6: 0.0}, 0.5),
        ({"dense": "deltas", "aggregate": "product"}, {1: 0.8, 4: -0.4, 6: -0.04}, 0.36),
        ({"dense": "deltas", "aggregate": "last"}, {1: 0.8, 4: -0.3, 6: 0.4}, 0.9),
        ({"dense": "absolute"}, {1: 0.8, 4: 0.5, 6: 0.9}, 2.2),
    ],
)
def test_a_step_is_rewarded_at_the_token_that_ends_it_and_the_last_one_at_the_last_token(
    options: Any, rewards: dict[int, float], score: float
) -> None:
    """Tokens: c, line end, d, d, line end, e, EOS. Likewise by hand."""
    found = fixed("c\ndd\ne", **options)
    assert found.token_rewards == pytest.approx([rewards.get(index, 0.0) for index in range(7)], abs=1e-12)
    assert found.score == pytest.approx(score, abs=1e-12)
    assert found.components["solution"] == pytest.approx(0.5 if options["dense"] == "absolute" else score)


def test_a_response_that_ends_with_a_separator_has_its_last_reward_on_its_last_token() -> None:
    found = fixed("c\n\nd\n", dense="absolute")
    assert found.token_rewards == pytest.approx([0, 0.8, 0, 0, 0, 0.5])


def trained_on(prompt: Prompt, text: str, tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token ids of the solution, and the ends of its steps, as training has them."""
    steps = text.split("\n")
    asked = prompt.text if prompt.messages is None else list(prompt.messages)
    row = Row(source="s", number=1, values={"prompt": asked, "steps": steps, "labels": [1] * len(steps)})
    (example,), _ = load_step_examples([row], tokenizer, StepOptions())
    return example.token_ids, example.ends


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    "prompt", [ASKED, Prompt(id="m", token_ids=(3, 6, 7, 2, 4), messages=MESSAGES)], ids=["text", "messages"]
)
def test_it_reads_the_tokens_of_training_and_judges_the_same_places(prompt: Prompt, *, own: bool) -> None:
    """Both with the policy's tokenizer and with one that gives letters other ids and has another template."""
    model, tokenizer = step_model(), other_tokenizer() if own else tiny_tokenizer()
    source = ProcessReward(model, tokenizer, policy_tokenizer=tiny_tokenizer(), aggregate="last", dense="absolute")
    text = "cd\ne\nfgh"
    ids, ends = trained_on(prompt, text, tokenizer)
    with torch.no_grad():
        expected = model.token_scores(pack([ids]))[list(ends)].double().sigmoid()
    (found,) = source.score([said(text, to=prompt)])
    assert found.token_rewards is not None
    # In the policy's tokens: c, d, line end, e, line end, f, g, h, EOS.
    at = torch.tensor(found.token_rewards)[[2, 4, 8]]
    torch.testing.assert_close(at, expected.float(), rtol=0, atol=1e-6)
    assert len({round(value, 4) for value in expected.tolist()}) == 3


@pytest.mark.parametrize("tokens_per_microbatch", [1, 20, 10_000])
def test_a_judgement_does_not_depend_on_the_company_or_the_token_budget(tokens_per_microbatch: int) -> None:
    texts = ("cd\ne", "f", "cd\ngh\nab", "cd\ne")
    model = step_model()
    alone = [judge(model).score([said(text)])[0].score for text in texts]
    found = judge(model, tokens_per_microbatch=tokens_per_microbatch).score([said(text) for text in texts])
    assert [each.score for each in found] == pytest.approx(alone, abs=1e-6)
    assert len({round(score, 5) for score in alone}) == 3


def test_a_step_is_judged_without_those_behind_it() -> None:
    model = step_model()
    short, long = (judge(model, dense="absolute").score([said(text)])[0] for text in ("cd\ne", "cd\nf\ng"))
    assert short.token_rewards is not None
    assert long.token_rewards is not None
    assert short.token_rewards[2] == pytest.approx(long.token_rewards[2], abs=1e-6)


@pytest.mark.parametrize("dense", ["none", "deltas", "absolute"])
def test_a_response_without_a_step_is_at_fault_and_gets_nothing(dense: Any) -> None:
    for empty in (said(""), said(" \n\n"), response((), to=ASKED, finish=Finish.LENGTH, text="")):
        (found,) = judge(dense=dense).score([empty])
        assert (found.score, found.state, found.token_rewards) == (0.0, ScoreState.MODEL_FAULT, None)
        assert found.components == {"solution": 0.0, "steps": 0.0, "right_steps": 0.0}


def test_a_prompt_of_token_ids_alone_is_read_with_the_policys_tokenizer_only() -> None:
    alone = Prompt(id="ids", token_ids=(6, 7))
    model = step_model()
    assert judge(model).score([said("c\nd", to=alone)])[0].score == judge(model).score([said("c\nd")])[0].score
    source = ProcessReward(model, other_tokenizer(), policy_tokenizer=tiny_tokenizer())
    with pytest.raises(DataError, match=r"prompt 'ids' has token ids only.*needs text or messages"):
        source.score([said("c\nd", to=alone)])


def test_what_is_too_long_or_not_finite_has_no_score() -> None:
    (found,) = judge().score([said("ab" * 130)])
    assert found.state is ScoreState.INFRASTRUCTURE_FAULT
    assert "prm reads at most 256 of its tokens, the response makes 263" in str(found.reason)
    broken = step_model()
    with torch.no_grad():
        broken.trained_head()[0].fill_(math.nan)
    (found,) = judge(broken).score([said("c\nd")])
    assert (found.state, found.reason) == (
        ScoreState.INFRASTRUCTURE_FAULT,
        "prm gave a step a score that is not a finite number",
    )


def test_what_cannot_be_used_is_refused_in_words() -> None:
    plain = scalar_from_language_model(LanguageModel(tiny_language_model()), HeadStart.NORMAL)
    with pytest.raises(ConfigError, match=r"'prm' does not say what separates steps.*set step_separator"):
        judge(plain)
    assert judge(plain, step_separator="; ").separator == "; "
    with pytest.raises(ConfigError, match=r"dense: deltas, which rewards tokens of the policy.*dense: none"):
        judge(dense="deltas", policy_tokenizer=None)
    with pytest.raises(ConfigError, match="cannot write step_separator '#'"):
        judge(step_separator="#")


SPEC = DeviceSpec(device=torch.device("cpu"), precision=Precision.FLOAT32, seed=0)


def test_a_saved_model_knows_its_separator_and_its_kind(tmp_path) -> None:
    model = step_model()
    mark_steps(model, "; ")
    save_pretrained(model.model, tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    config = reward_model_config(str(tmp_path))
    assert isinstance(config, PRMRewardConfig)
    source = build_reward_source(config, tiny_tokenizer(), device_spec=SPEC, tokens_per_microbatch=100)
    assert isinstance(source, ProcessReward)
    assert (source.separator, source.name) == ("; ", "prm")
    as_model = ModelRewardConfig(kind="model", path=str(tmp_path))
    with pytest.raises(ConfigError, match="is a process reward model.*set kind: prm"):
        build_reward_source(as_model, tiny_tokenizer(), device_spec=SPEC, tokens_per_microbatch=100)


def test_transformers_alone_gives_the_judgements_of_a_saved_model(tmp_path) -> None:
    """As docs/process-rewards.md says."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = step_model()
    save_pretrained(model.model, tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    own = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    ids = (
        tokenizer("ab", add_special_tokens=False)["input_ids"]
        + tokenizer("cd\ne\n", add_special_tokens=False)["input_ids"]
    )
    hidden: Tensor = own.base_model(torch.tensor([ids])).last_hidden_state
    probabilities = own.score(hidden[0, [4, 6]])[:, 0].sigmoid()
    (found,) = judge(model, dense="absolute").score([said("cd\ne")])
    assert found.token_rewards is not None
    torch.testing.assert_close(probabilities, torch.tensor(found.token_rewards)[[2, 4]], rtol=0, atol=1e-6)


def test_estimators_of_whole_responses_refuse_rewards_of_steps(tmp_path) -> None:
    recipe = recipe_of("ppo", make_inputs(tmp_path))
    source = {"kind": "prm", "path": "x", "dense": "deltas"}
    groups = {"ppo.advantage": "group_centred", "ppo.responses_per_prompt": 2, "value": {"init_from": "policy"}}
    with pytest.raises(ValueError, match="reward source prm has token-level rewards"):
        PPORecipe.model_validate(changed(recipe, {**groups, "reward": [source]}))
    PPORecipe.model_validate(changed(recipe, {**groups, "reward": [source | {"dense": "none"}]}))
