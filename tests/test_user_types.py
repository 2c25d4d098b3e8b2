"""Types for users: mypy, ty and Pyright check a program that uses the library, and find what a wrong one misuses.

Pyright runs as basedpyright, which comes from PyPI with the Node that it needs.
"""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

USES = """
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import assert_type

import proximo
from proximo import (
    FunctionReward,
    OptimizerConfig,
    PPOConfig,
    PPOTrainer,
    Prompt,
    Response,
    RolloutConfig,
    SavedRun,
    Scored,
    Sink,
    TrackedRun,
    Training,
    UserError,
    WeightedReward,
    shipped_recipes,
)


def short(prompts: Sequence[str], responses: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> list[float]:
    return [-len(response) / 100 for response in responses]


class Polite:
    # A source of scores.

    name = "polite"

    def score(self, responses: Sequence[Response]) -> list[Scored]:
        return [Scored(response=each, score=float("please" in each.text)) for each in responses]


class Printed:
    # A sink.

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        print(step, metrics.get("score/mean"))

    def close(self) -> None:
        print("closed")


def open_sink(run: TrackedRun) -> Sink:
    print(run.id, run.folder)
    return Printed()


def on_step(step: int, metrics: Mapping[str, float]) -> None:
    if metrics.get("score/mean", 0.0) > 0.9:
        raise KeyboardInterrupt


def with_a_recipe(rows: list[dict[str, Any]]) -> SavedRun:
    changes = {
        "reward": [short, (0.5, Polite())],
        "data.sources": [rows],
        "run.sinks": [Printed(), open_sink],
        "ppo.num_steps": 20,
    }
    training = Training("ppo-function", changes, quiet=True)
    print(training.dry_run(), training.recipe.run.folder)
    for plan in training.plan():
        print(plan.largest.name, plan.largest.peak)
    run = training.fit(resume="auto", on_step=on_step)
    assert_type(run, SavedRun)
    assert_type(run.metrics, list[Mapping[str, float]])
    evaluation = run.evaluate(checkpoint="best", num_prompts=8, solved_score=0.5)
    print(evaluation.step, evaluation.metrics["score/mean"], len(evaluation.samples))
    for response in run.generate(["Say hello."], num_samples=2, chat=True, temperature=0.7):
        print(response.finish.value, response.text)
    ranked = run.generate(["Say hello."], reward=[short, (0.5, Polite())], keep=1, num_samples=4, stop_strings=("\\n",))
    assert_type(ranked[0], Scored)
    print(ranked[0].score, run.generate(["Say hello."], reward=run, engine="local")[0].response.text)
    assert_type(run.export("models/short", merge=True, dtype="bfloat16", push="me/short", private=True), Path)
    page: Path = run.report()
    print(page.name)
    print(run.chat(system="Be brief.").answer("Hello").text)
    return run


def with_models(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> float:
    config = PPOConfig(
        num_steps=2,
        prompts_per_step=4,
        rollout=RolloutConfig(max_new_tokens=16),
        policy_optimizer=OptimizerConfig(learning_rate=1e-5),
    )
    reward = WeightedReward([(1.0, FunctionReward(short, name="short")), (0.5, Polite())])
    trainer = PPOTrainer(policy, tokenizer, config=config, reward=reward)
    assert_type(trainer, PPOTrainer)
    history = trainer.train(["Say hello."], reward=[short, (0.5, Polite())], on_step=on_step)
    assert_type(history, list[dict[str, float]])
    responses = trainer.generate([Prompt(id="a", token_ids=(1, 2)), "a text", [1, 2]])
    assert_type(responses, list[Response])
    stats = trainer.step(["a text"], responses, [1.0, None])
    return stats["score/mean"] + history[-1]["kl/sequence"] + trainer.config.advantage.discount


def main() -> None:
    print(proximo.__version__.upper(), [recipe.name for recipe in shipped_recipes()])
    try:
        print(with_a_recipe([{"prompt": "Say hello."}]))
    except UserError as error:
        print(error)
"""
MISUSES = """
from proximo import PPOConfig, PPOTrainer, PPOTrianer, Training

config = PPOConfig(num_steps=2)
config.nonsense
PPOTrainer("a model", 3)
run = Training("ppo").fit(resume="maybe")
run.export("out", dtype="float8")
run.evaluate(num_prompts="all")
print(run.metrics[0] + 1)
"""
MISTAKES = {
    "PPOTrianer": 2,
    "nonsense": 5,
    "a model": 6,
    "maybe": 7,
    "float8": 8,
    "all prompts": 9,
    "a number to a mapping": 10,
}
"""What is wrong, and in which line."""
CHECKERS = {
    "basedpyright": ["-m", "basedpyright", "--level", "error", "--pythonpath", sys.executable],
    "mypy": ["-m", "mypy", "--strict", "--cache-dir", "mypy_cache", "--no-error-summary"],
    "ty": ["-m", "ty", "check", "--output-format", "concise", "--error-on-warning", "--python", sys.prefix],
}


SLOW = ("basedpyright", "mypy")


@pytest.mark.parametrize(
    "checker", [pytest.param(each, marks=pytest.mark.soak) if each in SLOW else each for each in CHECKERS]
)
def test_a_program_that_uses_the_library_passes_and_mistakes_are_found(checker: str, tmp_path: Path) -> None:
    if find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed: make test installs it")
    (tmp_path / "uses.py").write_text(USES)
    (tmp_path / "misuses.py").write_text(MISUSES)
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    # Neither program touches what torch declares, which takes mypy a third of its time.
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-torch.*]\nfollow_imports = skip\n")
    command = [sys.executable, *CHECKERS[checker], "uses.py", "misuses.py"]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600)
    found = checked.stdout + checked.stderr
    assert checked.returncode == 1, found
    for mistake, line in MISTAKES.items():
        assert f"misuses.py:{line}:" in checked.stdout, (mistake, found)
    assert "uses.py" not in found.replace("misuses.py", ""), found
