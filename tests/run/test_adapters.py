"""Adapters in runs: a checkpoint must load, from anywhere, as the model that was trained."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from builders import tiny_language_model, tiny_tokenizer
from proximo.commands.generate import GenerateOptions, generate
from proximo.config.rewards.sources import FunctionRewardConfig
from proximo.models.loading import load_language_model
from proximo.models.packing import pack
from proximo.models.pretrained.sources import ModelSource
from proximo.ppo.from_recipe import build_task
from proximo.ppo.recipe import PPORecipe
from proximo.rollout.sampling import SamplingOptions
from proximo.run import journal
from proximo.run.checkpoint_lookup import find_checkpoint
from proximo.run.loop import run_trainer
from proximo.run.options import RunOptions
from proximo.supervised.sft_recipe import SFTRecipe

LORA = {"rank": 2, "alpha": 4.0}
FUNCTION = FunctionRewardConfig(kind="function", function="proximo.recipes.reviews.gold:gold_reward")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(journal, "write_report", lambda folder: folder / "report.html")
    tiny_language_model().save_pretrained("base")
    tiny_tokenizer().save_pretrained("base")
    rows = [{"prompt": "ab", "response": "cd"}] * 4
    Path("texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def fine_tuned(**tokenizer: Any) -> Path:
    """The adapter that a short run of fine-tuning saved."""
    recipe = SFTRecipe.model_validate(
        {
            "run": {"folder": "sft", "device": "cpu", "tensorboard": False},
            "model": {"path": "base", "lora": LORA},
            "tokenizer": tokenizer,
            "data": {"sources": [{"path": "texts.jsonl"}]},
            "sft": {"num_epochs": 4, "examples_per_step": 4, "optimizer": {"learning_rate": 0.05}},
        }
    )
    assert run_trainer(recipe, RunOptions(quiet=True)) == 0
    return find_checkpoint(Path("sft")).path("policy")


def ppo(path: Path, **sections: Any) -> PPORecipe:
    sections["model"] = {"path": str(path), **sections.get("model", {})}
    base = {
        "run": {"folder": "ppo", "device": "cpu"},
        "data": {"sources": [{"path": "texts.jsonl"}]},
        "reward": [FUNCTION],
        "ppo": {"rollout": {"max_new_tokens": 4}},
    }
    return PPORecipe.model_validate(base | sections)


def logits(path: Path) -> torch.Tensor:
    model = load_language_model(ModelSource(path=str(path)), device=torch.device("cpu"))
    return model.head.logits(model.hidden_states(pack([[1, 7, 8]])))


def test_without_a_new_one_an_adapter_is_merged_into_the_start() -> None:
    path = fine_tuned()
    policy = build_task(ppo(path)).ppo.policy
    assert not policy.has_adapter
    found = policy.head.logits(policy.hidden_states(pack([[1, 7, 8]])))
    torch.testing.assert_close(found, logits(path))
    assert not torch.allclose(found, logits(Path("base")), atol=1e-3)


def test_a_run_on_a_relative_base_is_used_from_another_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fine_tuned().absolute()
    here = logits(path)
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    assert torch.equal(logits(path), here)


def test_a_run_that_added_tokens_answers_prompts_with_them() -> None:
    """The base that the adapter is loaded on has no rows for them."""
    fine_tuned(added_tokens=["<n1>", "<n2>"])
    options = GenerateOptions(sampling=SamplingOptions(max_new_tokens=3), device="cpu")
    (response,) = generate("sft", ["ab<n2>"], options)
    assert response.prompt.token_ids[-1] == 64  # the first that the base has no row for
