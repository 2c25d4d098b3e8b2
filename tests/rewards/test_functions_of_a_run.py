"""A reward function in a recipe, a pipeline and a trainer: bound before a model is loaded, and called as TRL would."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from builders import tiny_language_model, tiny_tokenizer
from proximo import ConfigError, DataError, PPOConfig, PPOTrainer, Prompt, Training
from proximo.cli import main
from proximo.commands.pipeline import run as pipeline
from proximo.commands.pipeline.recipe import PipelineRecipe
from proximo.ppo import from_recipe
from proximo.run.options import RunOptions
from tiny_runs import make_inputs, recipe_of

FUNCTIONS = """
async def trl(completions, answer, **kwargs):
    return [len(c) / 10 + float(len(a)) for a, c in zip(answer, completions)]

def ours(prompts, responses, metadata):
    return [len(r) / 10 + float(len(m["answer"])) for r, m in zip(responses, metadata)]

def other_names(p, r, m):
    return [0.0 for _ in r]

def of_the_step(completions, trainer_state):
    return [0.0 for _ in completions]
"""
REFUSED = {
    "other_names": ("rows.jsonl, row ", "reward function 'other_names' has a parameter 'p'", "docs/rewards.md"),
    "of_the_step": ("has a parameter 'trainer_state', which is not given here", "docs/rewards.md"),
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_inputs(tmp_path)
    (tmp_path / "named_rewards.py").write_text(FUNCTIONS)
    rows = [{"prompt": "ab " * number, "answer": "x" * number} for number in range(1, 13)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def recipe(place: Path, function: str, **source: Any) -> dict[str, Any]:
    rows = {"sources": [{"path": str(place / "rows.jsonl")}]}
    made = recipe_of("ppo", place)
    reward = [{"kind": "function", "function": f"named_rewards:{function}", **source}]
    return {**made, "data": made["data"] | rows, "reward": reward, "value": {"init_from": "policy"}, "gold": None}


def no_model(*_: Any, **__: Any) -> None:
    pytest.fail("a model was loaded")


@pytest.mark.parametrize("function", REFUSED)
def test_what_cannot_be_bound_is_refused_before_a_model_is_loaded(
    place: Path, function: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(from_recipe, "build_language_model", no_model)
    (place / "recipe.json").write_text(json.dumps(recipe(place, function)))
    for how in (["--dry-run"], []):
        assert main(["ppo", "recipe.json", *how]) == 2
        told = capsys.readouterr().err
        assert all(part in told for part in REFUSED[function])
    assert not (place / "run").exists()


def test_a_pipeline_binds_its_functions_before_its_first_stage(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "run_trainer", lambda *_: pytest.fail("a stage began"))
    stages = {name: recipe_of(name, place) for name in ("sft", "ppo")} | {"ppo": recipe(place, "of_the_step")}
    parts = {name: {key: part for key, part in made.items() if key != "run"} for name, made in stages.items()}
    asked = PipelineRecipe.model_validate({"run": {"folder": str(place / "pipeline")}, **parts})
    with pytest.raises(ConfigError, match="'trainer_state', which is not given here"):
        pipeline.run_pipeline(asked, RunOptions(quiet=True))


def test_a_function_of_trl_gives_the_run_that_the_same_one_in_our_form_gives(place: Path) -> None:
    runs = {}
    for name in ("trl", "ours"):
        made = recipe(place, name, name="length")
        made["run"] = made["run"] | {"folder": str(place / name)}
        Training(made).fit(quiet=True)
        lines = (place / name / "metrics.jsonl").read_text().splitlines()
        shown = ("score/mean", "score/length/mean", "evaluation/score", "policy/loss")
        runs[name] = [{key: value for key, value in json.loads(line).items() if key in shown} for line in lines]
    assert runs["trl"] == runs["ours"]
    assert runs["trl"][-1]["score/length/mean"] > 1


def trainer(**options: Any) -> PPOTrainer:
    config = PPOConfig(num_steps=1, prompts_per_step=2, rollout={"max_new_tokens": 4}, **options)
    return PPOTrainer(tiny_language_model(), tiny_tokenizer(), config=config)


def test_a_trainer_checks_the_columns_before_it_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [Prompt(id=name, token_ids=(5, 6), text="ab", metadata={"level": 1}) for name in "ab"]
    asked.append(Prompt(id="c", token_ids=(5, 6), text="ab"))

    def graded(completions: list[str], level: list[int]) -> list[float]:
        return [float(each) for each in level]

    made = trainer()
    monkeypatch.setattr(made, "run_step", lambda **_: pytest.fail("it sampled"))
    said = "prompt 'c': reward function 'graded' has a parameter 'level'.*a Prompt of your own has them in metadata"
    with pytest.raises(DataError, match=said):
        made.train(asked, reward=graded)
    assert trainer().train(asked[:2], reward=graded)[0]["score/mean"] == 1.0


def one_task(applies: Callable[[str], bool], score: float) -> Callable[..., Any]:
    return lambda prompts, completions: [score if applies(asked) else None for asked in prompts]


def test_functions_of_two_tasks_score_the_prompts_of_their_own() -> None:
    """As the multi-task scripts of TRL have them: None is for a prompt of another task."""
    letters, digits = one_task(str.isalpha, 1.0), one_task(str.isdigit, 3.0)
    letters.__name__, digits.__name__ = "letters", "digits"
    (line,) = trainer().train(["ab", "12"], reward=[letters, digits])
    assert line["response/unscored"] == 0
    assert (line["score/letters/mean"], line["score/digits/mean"]) == (1.0, 3.0)
    assert math.isclose(line["score/mean"], 2.0)
    lenient = {"guards": {"max_unscored_fraction": 0.6}}
    (line,) = trainer(task_reward="digits", **lenient).train(["ab", "12"], reward=[letters, digits])
    assert (line["response/unscored"], line["score/mean"]) == (1, 3.0)
