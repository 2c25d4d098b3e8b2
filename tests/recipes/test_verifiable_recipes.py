"""The recipes with verifiers, run for a few steps: from nothing in the real sandbox, and with a real tokenizer."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from builders import tiny_language_model
from proximo.cli import main
from real_data import real_data

MADE = ("countdown", "countdown-groups", "programs", "programs-groups")
HUB = ("gsm8k", "mbpp")
SMALL_MODEL = [
    f"sft.model.config.{key}={value}"
    for key, value in (("hidden_size", 16), ("intermediate_size", 16), ("num_hidden_layers", 1))
]
SMALL_MADE = [
    *SMALL_MODEL,
    *("sft.model.config.num_attention_heads=1", "sft.model.config.num_key_value_heads=1", "run.tensorboard=false"),
    *("sft.data.sources.0.kwargs.num_rows=80", "sft.data.held_out_rows=8", "sft.sft.examples_per_step=36"),
    *("ppo.data.sources.0.kwargs.num_rows=16", "ppo.data.evaluation_sources.0.kwargs.num_rows=3"),
    *("ppo.ppo.num_steps=1", "ppo.ppo.prompts_per_step=2", "ppo.ppo.minibatch_responses=null"),
    *("ppo.ppo.rollout.max_new_tokens=6", "ppo.run.evaluate_every_steps=null"),
]
SMALL_HUB = [
    *("model.path=model", "model.activation_checkpointing=false", "run.precision=float32", "run.device=cpu"),
    *("run.tensorboard=false", "run.save_every_minutes=null", "ppo.num_steps=2", "ppo.prompts_per_step=2"),
    *("ppo.responses_per_prompt=2", "ppo.minibatch_responses=null", "ppo.rollout.max_new_tokens=8"),
    *("ppo.policy_optimizer.warmup_updates=0", "ppo.guards.max_constant_reward_steps=null", "reward.0.workers=1"),
]
DATA = {
    "gsm8k": ("gsm8k/train.jsonl", "gsm8k/test_dev.jsonl"),
    "mbpp": ("mbpp/mbpp_dev.jsonl", "mbpp/sanitized_mbpp_dev.json"),
}


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("recipe", [*MADE, *HUB])
def test_the_recipe_says_what_it_would_do(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["ppo" if recipe in HUB else "pipeline", recipe, "--dry-run"]) == 0
    assert "(verifier), weight 1" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("recipe", ["countdown", pytest.param("programs-groups", marks=pytest.mark.soak)])
def test_the_recipe_from_nothing_runs_through(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["pipeline", recipe, *SMALL_MADE, "--quiet"]) == 0
    start, step = lines(tmp_path / "runs" / recipe / "ppo")
    assert start["evaluation/unscored"] == step["response/unscored"] == 0
    assert start["evaluation/pass_at_1"] == 0, "a model of this size writes nothing that is right"
    samples = (tmp_path / "runs" / recipe / "ppo" / "samples.jsonl").read_text().splitlines()
    judged = {name for line in samples for name in json.loads(line)["components"]}
    assert {"countdown.well_formed"} <= judged or {"code.tests_passed"} <= judged


@pytest.mark.parametrize("recipe", ["gsm8k", pytest.param("mbpp", marks=pytest.mark.soak)])
def test_the_recipe_for_a_hub_model_runs_with_its_tokenizer_and_real_data(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random weights of the same architecture: every verdict is a wrong answer, and none is a fault of ours."""
    train, test = (real_data(name) for name in DATA[recipe])
    monkeypatch.chdir(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(real_data("tokenizers/qwen2.5"))
    tokenizer.save_pretrained("model")
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    size = {"vocab_size": len(tokenizer), "max_position_embeddings": 1024, "tie_word_embeddings": True}
    tiny_language_model("qwen2", num_hidden_layers=1, **size, **ends).save_pretrained("model")
    data = [
        f"data.sources=[{{path: '{train}', problems: {recipe}, max_rows: 60}}]",
        f"data.evaluation_sources=[{{path: '{test}', problems: {recipe}, max_rows: 2}}]",
    ]
    assert main(["ppo", recipe, *SMALL_HUB, *data]) == 0
    start, *steps = lines(tmp_path / "runs" / recipe)
    assert [line["step"] for line in steps] == [1, 2]
    for line in steps:
        assert line["response/unscored"] == 0
        assert line["score/task_reward_mean"] == 0
        assert (line["group/effective_fraction"], line["group/zero_variance_fraction"]) == (0, 1)
    assert start["evaluation/task_reward"] == 0
    sample = json.loads((tmp_path / "runs" / recipe / "samples.jsonl").read_text().splitlines()[0])
    assert "user: " in sample["prompt"]
