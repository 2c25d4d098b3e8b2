"""From a recipe to a PPO task: what cannot work is said before training, with the role that it cannot work for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from builders import tiny_language_model, tiny_tokenizer
from proximo.errors import ConfigError
from proximo.models.language import LanguageModel
from proximo.models.pretrained.saving import save_pretrained
from proximo.models.scalar import HeadStart, scalar_from_language_model
from proximo.ppo.from_recipe import build_task
from proximo.ppo.recipe import PPORecipe

SHORT = {"max_position_embeddings": 11}


@pytest.fixture(autouse=True)
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that read 256 and 11 positions, and prompts of 6 tokens."""
    monkeypatch.chdir(tmp_path)
    for suffix, options in (("", {}), ("_short", SHORT)):
        origin = tiny_language_model(**options)
        scorer = scalar_from_language_model(LanguageModel(origin), HeadStart.NORMAL)
        for name, model in ((f"model{suffix}", origin), (f"scorer{suffix}", scorer.model)):
            save_pretrained(model, Path(name))
            tiny_tokenizer().save_pretrained(name)
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": "abcdef"}) + "\n" for _ in range(4)))


def recipe(changes: dict[str, Any], *, max_new_tokens: int = 6) -> PPORecipe:
    base = {
        "run": {"folder": "run", "device": "cpu"},
        "model": {"path": "model"},
        "data": {"sources": [{"path": "prompts.jsonl"}]},
        "reward": [{"kind": "model", "path": "scorer"}],
        "ppo": {"num_steps": 1, "prompts_per_step": 4, "rollout": {"max_new_tokens": max_new_tokens}},
    }
    return PPORecipe.model_validate(base | changes)


@pytest.mark.parametrize(
    ("role", "changes"),
    [
        ("policy", {"model": {"path": "model_short"}, "value": {"path": "model"}}),
        ("reference", {"reference": {"path": "model_short"}}),
        ("value", {"value": {"path": "model_short"}}),
        ("reward_model", {"reward": [{"kind": "model", "path": "scorer_short"}]}),
    ],
)
def test_a_model_that_cannot_read_prompt_and_response_is_named_before_training(role: str, changes: dict) -> None:
    with pytest.raises(ConfigError, match=rf"6 tokens and .* 6 make 12, but the {role} model .* at most 11"):
        build_task(recipe(changes))
    build_task(recipe(changes, max_new_tokens=5))


def test_a_reward_model_with_its_own_tokenizer_says_of_each_answer_whether_it_fits() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained("scorer_short")
    task = build_task(recipe({"reward": [{"kind": "model", "path": "scorer_short"}]}))
    torch.manual_seed(0)
    responses = task.ppo.generate(task.prompts)
    found = task.reward.score(responses)
    assert [each.valid for each in found] == [len(r.text) + 6 + r.finish.terminated <= 11 for r in responses]
