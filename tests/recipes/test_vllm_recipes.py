"""The recipes that sample with vLLM: what they would do, what they take, and a run against a fake server."""

from pathlib import Path
from typing import Any

import pytest
from test_verifiable_recipes import SMALL_HUB, lines
from transformers import AutoTokenizer, Qwen2Config

from builders import tiny_language_model
from fake_vllm import fake_environment
from proximo.cli import main
from proximo.config.loader import load_recipe
from proximo.plan.profiling import make_plans
from proximo.plan.record import Plan
from real_data import real_data

SHAPES: dict[str, dict[str, Any]] = {
    "gsm8k-vllm": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "gsm8k-7b-vllm": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
}
"""Those of Qwen2.5-0.5B and 7B, but for the number of layers."""


def plan_of(recipe: str, place: Path, *, num_layers: int) -> Plan:
    """The plan of a shipped recipe for so many layers of its model."""
    folder = place / f"{recipe}-{num_layers}"
    Qwen2Config(**SHAPES[recipe], num_hidden_layers=num_layers, max_position_embeddings=32768).save_pretrained(folder)
    AutoTokenizer.from_pretrained(real_data("tokenizers/qwen2.5")).save_pretrained(folder)
    loaded = load_recipe("ppo", recipe, [f"model.path={folder}", "run.device=cuda"]).recipe
    (plan,) = make_plans(loaded, device="cuda", num_ranks=loaded.devices.num or 1)
    return plan


@pytest.mark.parametrize("recipe", ["gsm8k-vllm", pytest.param("gsm8k-7b-vllm", marks=pytest.mark.soak)])
def test_the_plan_is_that_of_the_learner_and_says_what_a_server_takes(recipe: str, tmp_path: Path) -> None:
    plan, num_ranks = plan_of(recipe, tmp_path, num_layers=1), 4 if recipe == "gsm8k-7b-vllm" else 1
    assert [phase.name for phase in plan.phases] == ["policy_logprobs", "reference_logprobs", "train_policy"]
    parts = plan.phases[-1].parts_bytes
    shape = SHAPES[recipe]
    width, inner, keys = shape["hidden_size"], shape["intermediate_size"], 64 if num_ranks == 1 else 128
    keys *= 2 * shape["num_key_value_heads"]
    of_layer = 2 * width * width + width * keys + width + keys + 3 * width * inner + 2 * width
    size = (2 - shape["tie_word_embeddings"]) * shape["vocab_size"] * width + of_layer + width
    assert parts["policy weights"] == pytest.approx(4 * size / num_ranks, rel=1e-3)
    assert parts["policy optimizer"] == pytest.approx(8 * size / num_ranks, rel=1e-3)
    servers, push = plan.notes
    assert f"Each has weights of {2 * size / 2**30:.2f} GiB and a cache" in servers
    assert f"it keeps {2 * size / 2**30:.2f} GiB of the learner's" in push


@pytest.mark.parametrize("recipe", SHAPES)
def test_the_recipe_says_that_vllm_samples(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["ppo", recipe, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "vLLM, 1 started by the run" in said
    assert ("4 on this machine" in said) == (recipe == "gsm8k-7b-vllm")


@pytest.mark.soak
def test_the_recipe_runs_with_its_tokenizer_and_real_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights of the same architecture, sampled by a server: its log-probs are weighed against the learner's."""
    train, test = (real_data(f"gsm8k/{name}.jsonl") for name in ("train", "test_dev"))
    monkeypatch.chdir(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(real_data("tokenizers/qwen2.5"))
    tokenizer.save_pretrained("model")
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    size = {"vocab_size": len(tokenizer), "max_position_embeddings": 1024, "tie_word_embeddings": True}
    tiny_language_model("qwen2", num_hidden_layers=1, **size, **ends).save_pretrained("model")
    here = [
        f"data.sources=[{{path: '{train}', problems: gsm8k, max_rows: 60}}]",
        f"data.evaluation_sources=[{{path: '{test}', problems: gsm8k, max_rows: 2}}]",
        f"engine.environment={fake_environment(tmp_path / 'environment')}",
        "engine.arguments=[]",
        "ppo.advantage.zero_variance_groups=keep",  # all answers are wrong, so every group would be left out
    ]
    assert main(["ppo", "gsm8k-vllm", *SMALL_HUB, *here]) == 0
    start, *steps = lines(tmp_path / "runs" / "gsm8k-vllm")
    assert start["evaluation/task_reward"] == 0
    assert [line["step"] for line in steps] == [1, 2]
    for line in steps:
        assert line["response/unscored"] == line["mismatch/missing_logprobs"] == 0
        assert line["policy/behaviour_weight"] == pytest.approx(1, abs=1e-4)
