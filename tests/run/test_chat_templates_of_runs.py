"""Every chat template that a run will use is tried before weights are read; what it refuses later is a fault."""

import json
from pathlib import Path
from typing import Any

import pytest

from builders import CHAT_TEMPLATE, tiny_language_model, tiny_tokenizer
from proximo.errors import DataError, ModelError, ProximoError
from proximo.models import loading
from proximo.models.language import LanguageModel
from proximo.models.scalar import HeadStart, scalar_from_language_model
from proximo.ppo import from_recipe
from proximo.ppo.recipe import PPORecipe
from proximo.records import Prompt
from proximo.rewards.model import ModelReward
from proximo.run.loop import run_trainer
from proximo.run.options import RunOptions
from proximo.supervised import sft_trainer as sft
from proximo.supervised.sft_recipe import SFTRecipe
from records_made import response
from tiny_runs import make_inputs, recipe_of

DROPPING = (
    "{% for m in messages %}{% if m['role'] != 'assistant' or loop.last %}<|{{ m['role'] }}|>{{ m['content'] }}<eos>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""As Qwen3's drops what the assistant thought in earlier turns."""
WITHOUT_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + CHAT_TEMPLATE
)
LOOPING = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Prompts of several turns for a policy whose template renders them all."""
    place = make_inputs(tmp_path)
    turns = [("system", "be kind"), ("user", "ab"), ("assistant", "cd"), ("user", "ef")]
    prompt = {"messages": [{"role": role, "content": content} for role, content in turns]}
    (place / "prompts.jsonl").write_text((json.dumps(prompt) + "\n") * 8)
    return place


def reward_template(place: Path, template: str) -> PPORecipe:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(place / "reward_model")
    recipe = recipe_of("ppo", place)
    recipe["value"] = {"init_from": "policy"}
    recipe["data"]["max_prompt_tokens"] = 40
    recipe["ppo"] |= {"num_steps": 2}
    return PPORecipe.model_validate(recipe)


def test_a_reward_model_whose_template_rewrites_earlier_turns_scores_a_whole_run(place: Path) -> None:
    assert run_trainer(reward_template(place, DROPPING), RunOptions(quiet=True)) == 0
    lines = [json.loads(line) for line in (place / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(line.get("response/unscored", 0) == 0 for line in lines)


@pytest.mark.usefixtures("hurry")
@pytest.mark.parametrize(
    ("template", "error", "message"),
    [
        (WITHOUT_SYSTEM, DataError, r"prompts-\d.*refuses the messages.*no system here"),
        (LOOPING, ModelError, "end of turn: .* 1 s of"),
    ],
)
def test_a_template_that_a_reward_model_cannot_use_is_refused_before_weights_are_read(
    template: str, error: type[ProximoError], message: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = reward_template(place, template)
    monkeypatch.setattr(loading, "_saved_model", lambda *_: pytest.fail("weights were read"))
    monkeypatch.setattr(loading, "random_model", lambda *_: pytest.fail("weights were drawn"))
    with pytest.raises(error, match=message):
        from_recipe.build_task(recipe)


@pytest.mark.usefixtures("hurry")
def test_a_policys_template_that_never_ends_is_refused_though_its_data_is_text(place: Path) -> None:
    recipe: dict[str, Any] = recipe_of("sft", place)
    recipe["tokenizer"]["chat_template"] = LOOPING
    with pytest.raises(ModelError, match="more than 1 s of computing"):
        sft.build_task(SFTRecipe.model_validate(recipe))


def test_an_answer_that_the_template_refuses_is_a_fault_of_that_answer() -> None:
    tokenizer = tiny_tokenizer()
    refusing = "{% if 'bad' in messages[-1].content %}{{ raise_exception('a bad word') }}{% endif %}"
    tokenizer.chat_template = refusing + CHAT_TEMPLATE
    model = scalar_from_language_model(LanguageModel(tiny_language_model()), HeadStart.NORMAL)
    source = ModelReward(model, tokenizer=tokenizer)
    prompt = Prompt(id="p", token_ids=(3,), messages=({"role": "user", "content": "ab"},))
    answers = [response((7,), to=prompt, text=text) for text in ("good", "bad", "good")]
    first, refused, third = source.score(answers)
    assert first.score == third.score
    assert not refused.valid
    assert "reward_model: prompt 'p': the chat template" in str(refused.reason)
