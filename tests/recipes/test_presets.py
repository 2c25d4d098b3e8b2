"""The recipes with the defaults of other systems: each trains on a tiny model; steps are those of their pipeline."""

import json

import pytest

from builders import tiny_language_model, tiny_tokenizer
from proximo.cli import main
from proximo.config.loader import load_recipe

ELSEWHERE = {"@sft": "models/sft", "@reward": "models/reward"}
"""What a stage finds in the pipeline -> where a step by itself finds it."""
RUN = ["run.precision=float32", "run.tensorboard=false", "run.device=cpu"]
STEP = ["num_steps=1", "prompts_per_step=4", "minibatch_responses=4", "rollout.max_new_tokens=4"]
PAIRED = "{path: rows.jsonl"
LABELLED = f"{PAIRED}, columns: {{answer: label, response: label}}"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_language_model(num_hidden_layers=2).save_pretrained("model")
    tiny_tokenizer().save_pretrained("model")
    words = "a good long answer of many words", "a bad short answer of few words"
    rows = [{"prompt": f"say {n}: ", "label": words[0], "chosen": words[0], "rejected": words[1]} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def read_rows(**stages):
    """Overrides that let each stage of a pipeline train on the rows and be evaluated on a few of them."""
    return [
        f"{stage}.data.{key}=[{source}{limit}]"
        for stage, source in stages.items()
        for key, limit in (("sources", "}"), ("evaluation_sources", ", max_rows: 4}"))
    ]


def metrics(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("recipe", ["areal-ppo", "areal-grpo"])
def test_a_preset_with_a_function_trains(recipe, folder):
    small = [*(f"ppo.{each}" for each in STEP), "data.sources.0.kwargs.num_rows=8", "data.max_prompt_tokens=200"]
    model = ["model.path=model", "model.activation_checkpointing=false"]
    assert main(["ppo", recipe, *RUN, *model, *small]) == 0
    assert metrics(folder / "runs" / recipe)[-1]["step"] == 1


def test_the_preset_of_torchtune_trains_but_for_what_needs_an_accelerator(folder):
    reward = ["reward", "reward", *RUN, "model.path=model", f"data.sources=[{PAIRED}}}]", "reward.pairs_per_step=20"]
    assert main([*reward, "data.held_out_rows=0", "run.folder=runs/reward"]) == 0
    assert main(["export", "runs/reward", "models/reward"]) == 0
    models = ["model.path=model", "reward.0.path=models/reward", f"data.sources=[{PAIRED}}}]"]
    moments = ["ppo.policy_optimizer.kind=adamw", "ppo.value_optimizer.kind=adamw", "run.compile=none"]
    tokens = ["ppo.score.min_tokens=2", "ppo.rollout.stop_token_ids=[7]", "data.max_prompt_tokens=60"]
    small = [f"ppo.{each}" for each in STEP]
    assert main(["ppo", "torchtune-ppo", *RUN, *models, *moments, *tokens, *small]) == 0
    assert metrics(folder / "runs/torchtune-ppo")[-1]["step"] == 1


def test_the_preset_of_torchrl_trains(folder):
    models = ["sft.model.path=model", "reward.model.frozen_layers=1", "ppo.model.frozen_layers=1"]
    data = read_rows(sft=LABELLED, reward=PAIRED, ppo=LABELLED)
    small = ["sft.sft.examples_per_step=20", "reward.reward.pairs_per_step=20", *(f"ppo.ppo.{each}" for each in STEP)]
    assert main(["pipeline", "torchrl-rlhf", *RUN, *models, *data, *small, "--quiet"]) == 0
    assert metrics(folder / "runs/torchrl-rlhf/ppo")[-1]["step"] == 1


def test_the_preset_of_deepspeed_chat_goes_on_from_the_merged_adapter_of_its_first_step(folder):
    models = ["sft.model.path=model", "reward.model.path=model", "sft.model.lora.rank=2", "ppo.model.lora.rank=2"]
    data = read_rows(sft=LABELLED, reward=PAIRED, ppo=PAIRED)
    small = ["sft.sft.examples_per_step=4", "reward.reward.pairs_per_step=8", *(f"ppo.ppo.{each}" for each in STEP)]
    warm = [f"ppo.ppo.{role}_optimizer.warmup_updates=0" for role in ("policy", "value")]
    assert main(["pipeline", "deepspeed-chat-13b", *RUN, *models, *data, *small, *warm, "--quiet"]) == 0
    assert metrics(folder / "runs/deepspeed-chat-13b/ppo")[-1]["step"] == 1
    (merged,) = (folder / "runs/deepspeed-chat-13b/sft/merged").iterdir()
    assert json.loads((merged / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize(("kind", "number"), [("sft", 1), ("reward", 2), ("ppo", 3)])
def test_a_step_by_itself_has_the_settings_of_its_stage(kind, number):
    stage = getattr(load_recipe("pipeline", "deepspeed-chat-13b", ()).recipe, kind).model_dump(mode="json")
    step = load_recipe(kind, f"deepspeed-chat-13b-step{number}", ()).recipe.model_dump(mode="json")
    assert stage["run"].pop("folder") != step["run"].pop("folder")
    assert step == _moved(stage)


def _moved(value):
    match value:
        case dict():
            return {key: _moved(item) for key, item in value.items()}
        case list():
            return [_moved(item) for item in value]
        case str():
            return ELSEWHERE.get(value, value)
    return value
