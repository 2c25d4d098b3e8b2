"""Types for users: ty and mypy check a program that uses the library, and find the mistakes of one that misuses it."""

import subprocess
import sys
from pathlib import Path

import pytest

USES = """
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import assert_type

import proximo
from proximo import FunctionReward, OptimizerConfig, PPOConfig, PPOTrainer, Prompt, Response, RolloutConfig


def short(prompts: Sequence[str], responses: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> list[float]:
    return [-len(response) / 100 for response in responses]


def train(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> float:
    config = PPOConfig(
        num_steps=2,
        prompts_per_step=4,
        rollout=RolloutConfig(max_new_tokens=16),
        policy_optimizer=OptimizerConfig(learning_rate=1e-5),
    )
    trainer = PPOTrainer(policy, tokenizer, config=config, reward=FunctionReward(short))
    assert_type(trainer, PPOTrainer)
    history = trainer.train(["Say hello."], reward=short, on_step=lambda number, metrics: print(number, len(metrics)))
    assert_type(history, list[dict[str, float]])
    responses = trainer.generate([Prompt(id="a", token_ids=(1, 2)), "a text", [1, 2]])
    assert_type(responses, list[Response])
    stats = trainer.step(["a text"], responses, [1.0, None])
    print(proximo.__version__.upper())
    return stats["score/mean"] + history[-1]["kl/sequence"] + trainer.config.advantage.gamma
"""
MISUSES = """
from proximo import PPOConfig, PPOTrainer, PPOTrianer

config = PPOConfig(num_steps=2)
config.nonsense
PPOTrainer("a model", 3)
"""
MISTAKES = {"PPOTrianer": 2, "nonsense": 5, "a model": 6}
"""What is wrong, and in which line."""
CHECKERS = {
    "mypy": ["-m", "mypy", "--strict", "--cache-dir", "mypy_cache", "--no-error-summary"],
    "ty": ["-m", "ty", "check", "--output-format", "concise", "--error-on-warning", "--python", sys.prefix],
}


def check(checker: str, program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(program)
    command = [sys.executable, *CHECKERS[checker], "program.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=400)


@pytest.mark.parametrize("checker", CHECKERS)
def test_a_program_that_uses_the_library_passes_and_mistakes_are_found(checker: str, tmp_path: Path) -> None:
    uses = check(checker, USES, tmp_path)
    assert uses.returncode == 0, uses.stdout + uses.stderr
    misuses = check(checker, MISUSES, tmp_path)
    assert misuses.returncode == 1, misuses.stdout + misuses.stderr
    for mistake, line in MISTAKES.items():
        assert f"program.py:{line}:" in misuses.stdout, (mistake, misuses.stdout)
