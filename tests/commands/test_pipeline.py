"""The three steps in a row: each feeds the next, finished ones are skipped, and what they made loads elsewhere."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from proximo.checkpoint.run_folder import Resume
from proximo.cli import main
from proximo.commands import serve_reward
from proximo.commands.evaluate import run_evaluate
from proximo.commands.pipeline import run as pipeline
from proximo.commands.pipeline.recipe import PipelineRecipe
from proximo.config.loader import resolved_yaml
from proximo.errors import ConfigError, RunFolderError
from proximo.models.packing import pack
from proximo.models.sharing import base_alone
from proximo.plan.profiling import make_plans
from proximo.ppo.recipe import PPORecipe
from proximo.run import journal
from proximo.run.options import RunOptions
from recipe_files import write_recipe

REVIEWS = "proximo.recipes.reviews.review_rows"
TINY = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 192,
}


def source(function: str, rows: int, **others: int) -> dict[str, Any]:
    return {
        "sources": [{"function": f"{REVIEWS}:{function}", "kwargs": {"num_rows": rows} | others}],
        "held_out_rows": 4,
    }


def recipe(folder: Path, *, lora: bool = False, **ppo: Any) -> PipelineRecipe:
    adapter = {"lora": {"rank": 2, "alpha": 4}} if lora else {}
    return PipelineRecipe.model_validate(
        {
            "run": {"folder": str(folder), "tensorboard": False, "num_threads": 1},
            "sft": {
                "model": {"config": TINY}
                | ({"path": str(folder.parent / "base"), "config": None} | adapter if lora else {}),
                "tokenizer": {} if lora else {"train_vocab_size": 300},
                "data": source("sft_rows", 20) | {"max_tokens": 190},
                "sft": {"examples_per_step": 8},
            },
            "reward": {
                "tokenizer": {"path": "@sft"},
                "model": {"path": "@sft"} | adapter,
                "data": source("preference_rows", 20) | {"max_tokens": 190},
                "reward": {"pairs_per_step": 8},
            },
            "ppo": {
                "model": {"path": "@sft"} | adapter,
                "value": {"init_from": "reward"} | adapter,
                "data": source("prompt_rows", 20, seed=0),
                "reward": [{"kind": "model", "path": "@reward"}],
                "gold": {"kind": "function", "function": "proximo.recipes.reviews.gold:gold_reward"},
                "ppo": {"num_steps": 2, "prompts_per_step": 4, "rollout": {"max_new_tokens": 8}} | ppo,
            },
        }
    )


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "write_report", lambda folder: folder / "report.html")
    monkeypatch.setattr(pipeline, "write_pipeline_report", lambda folder: folder / "report.html")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "write_report", lambda folder: folder / "report.html")
        patch.setattr(pipeline, "write_pipeline_report", lambda folder: folder / "report.html")
        assert pipeline.run_pipeline(recipe(folder), RunOptions(quiet=True)) == 0
    return folder


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def resolved(stage: Any, folder: Path) -> Any:
    return type(stage).model_validate(pipeline.resolved_values(stage, folder))


def test_every_stage_leaves_its_lines_and_the_gold_score_is_watched(finished: Path) -> None:
    assert [line["step"] for line in lines(finished / "sft" / "metrics.jsonl")] == [0, 1, 2]
    assert "evaluation/pair_accuracy" in lines(finished / "reward" / "metrics.jsonl")[-1]
    ppo = lines(finished / "ppo" / "metrics.jsonl")
    assert {"gold/mean", "evaluation/gold", "kl/sequence", "value/explained_variance"} <= ppo[-1].keys()
    assert {sample["kind"] for sample in lines(finished / "ppo" / "samples.jsonl")} == {"train", "evaluation"}


def test_every_model_of_every_checkpoint_loads_with_transformers_alone(finished: Path) -> None:
    for stage, role in (("sft", "policy"), ("ppo", "policy")):
        folder = next((finished / stage / "checkpoints").glob(f"step-*/{role}"))
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        assert model(torch.tensor([tokenizer("Review")["input_ids"]])).logits.isfinite().all()
    for stage, role in (("reward", "reward"), ("ppo", "value")):
        folder = next((finished / stage / "checkpoints").glob(f"step-*/{role}"))
        model = AutoModelForSequenceClassification.from_pretrained(folder)
        assert model(torch.tensor([[5, 6, 7]])).logits.shape == (1, 1)


def test_a_service_of_the_rewards_has_the_model_of_the_stage(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served, text, trained = [], resolved_yaml(recipe(finished)), str(pipeline.whole_result(finished, "@reward"))
    monkeypatch.setattr(serve_reward, "serve", lambda sources, *_, **__: served.extend(sources))
    tokenised = text.replace(
        "path: '@reward'\n    revision: null\n    tokenizer: null", f"path: {trained}\n    tokenizer: '@sft'"
    )
    for given in (text, tokenised):
        main(["serve-reward", write_recipe(finished.parent, given)])
    assert [each.path for each in served] == [trained, trained]
    assert served[1].tokenizer == str(pipeline.whole_result(finished, "@sft"))


def test_the_value_model_starts_from_the_reward_model_with_its_head(finished: Path) -> None:
    from proximo.ppo.from_recipe import build_task

    stage = resolved(recipe(finished).ppo, finished)
    value = build_task(stage).ppo.roles.value
    saved = AutoModelForSequenceClassification.from_pretrained(pipeline.whole_result(finished, "@reward"))
    assert value is not None
    assert torch.equal(value.model.base.get_submodule("score").weight, saved.score.weight)


def test_finished_stages_are_skipped_and_nothing_is_written_again(finished: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*.jsonl")}
    assert pipeline.run_pipeline(recipe(finished), RunOptions(quiet=True, resume="must")) == 0
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*.jsonl")} == before


def test_a_pipeline_that_exists_is_not_started_over_by_accident(finished: Path) -> None:
    with pytest.raises(RunFolderError, match="already holds a finished run of 2 steps"):
        pipeline.run_pipeline(recipe(finished), RunOptions(quiet=True))


def test_a_reference_to_a_stage_that_did_not_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="@sft names the result of stage sft, .*: run the pipeline with a section"):
        pipeline.whole_result(tmp_path, "@sft")


def test_a_checkpoint_can_be_evaluated_again_with_the_same_result(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_evaluate(finished, checkpoint="latest", num_prompts=None, output=tmp_path / "out.jsonl") == 0
    assert "evaluation/gold" in capsys.readouterr().out
    samples = [s for s in lines(finished / "ppo" / "samples.jsonl") if s["kind"] == "evaluation" and s["step"] == 2]
    assert lines(tmp_path / "out.jsonl") == samples


def test_with_adapters_everywhere_each_stage_starts_from_what_the_one_before_made(
    finished: Path, tmp_path: Path
) -> None:
    from proximo.ppo.from_recipe import build_task

    shutil.copytree(pipeline.whole_result(finished, "@sft"), tmp_path / "base")
    made = recipe(tmp_path / "run", lora=True)
    assert pipeline.run_pipeline(made, RunOptions(quiet=True)) == 0
    after_sft = AutoModelForCausalLM.from_pretrained(pipeline.whole_result(tmp_path / "run", "@sft"))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    weight = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(after_sft.state_dict()[weight], base.state_dict()[weight])
    policy = build_task(resolved(made.ppo, tmp_path / "run")).ppo.policy
    ids = torch.tensor([[5, 6, 7]])
    reference = base_alone(policy)
    hidden = reference.hidden_states(pack([[5, 6, 7]]))
    torch.testing.assert_close(reference.head.logits(hidden), after_sft(ids).logits[0], rtol=0, atol=1e-5)
    sharing = {"kind": "model", "path": "@reward", "share_base": True}
    one_base = PPORecipe.model_validate(made.ppo.model_dump() | {"reward": [sharing], "value": {"init_from": "reward"}})
    task = build_task(resolved(one_base, tmp_path / "run"))
    assert "one copy of the base serves the policy and reference, value, reward_model" in task.notes


def test_a_stage_of_process_rewards_feeds_ppo(finished: Path, tmp_path: Path) -> None:
    start, folder = str(pipeline.whole_result(finished, "@sft")), tmp_path / "run"
    sums = {"function": "proximo.recipes.running_sums:rows", "kwargs": {"num_rows": 20, "seed": 1}}
    tree = recipe(folder).model_dump(mode="json", exclude_unset=True)
    tree["sft"] = tree["reward"] = None
    tree["prm"] = {
        "model": {"path": start},
        "data": {"sources": [sums], "held_out_rows": 4, "step_separator": "."},
        "prm": {"solutions_per_step": 8},
    }
    source = {"kind": "prm", "path": "@prm", "dense": "deltas"}
    tree["ppo"] |= {"model": {"path": start}, "value": {"init_from": "reward"}, "reward": [source]}
    made = PipelineRecipe.model_validate(tree)
    assert [plan.stage for plan in make_plans(made)] == ["prm", "ppo"]
    assert pipeline.run_pipeline(made, RunOptions(quiet=True)) == 0
    assert "evaluation/error_found" in lines(folder / "prm" / "metrics.jsonl")[-1]
    assert "score/prm.steps/mean" in lines(folder / "ppo" / "metrics.jsonl")[-1]
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.jsonl")}
    assert pipeline.run_pipeline(made, RunOptions(quiet=True, resume="must")) == 0
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.jsonl")} == before


@pytest.mark.parametrize(("resume", "passes"), [("must", False), ("auto", True)])
def test_stages_of_a_pipeline_that_is_resumed_by_hand_pass_over_no_damage(
    resume: Resume, passes: bool, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[RunOptions] = []
    monkeypatch.setattr(pipeline, "_run", lambda _recipe, options, **_: given.append(options) or 0)
    assert pipeline.run_pipeline(recipe(finished), RunOptions(quiet=True, resume=resume)) == 0
    assert {(options.resume, options.passes_over_damage) for options in given} == {("auto", passes)}


def test_a_pipeline_that_was_moved_is_evaluated_and_goes_on(finished: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(finished, tmp_path / "copy")
    (tmp_path / "copy").rename(moved)
    hidden = finished.with_name("hidden")
    finished.rename(hidden)
    try:
        assert run_evaluate(moved / "ppo", num_prompts=None, output=None) == 0
        longer = recipe(moved, num_steps=3)
        assert pipeline.run_pipeline(longer, RunOptions(resume="must", quiet=True)) == 0
    finally:
        hidden.rename(finished)
    steps = [json.loads(line)["step"] for line in (moved / "ppo" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2, 3]
