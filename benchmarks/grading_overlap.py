"""Grading beside sampling: seconds of scoring that are left when sampling has ended, and answers per second of a pool.

    python benchmarks/grading_overlap.py [--milliseconds 5] [--steps 4]

The verifier sleeps for so long on each answer, as one that waits for a program does, so it takes no core from sampling.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from builders import tiny_tokenizer
from proximo.config.ppo.options import PPOConfig
from proximo.models.language import LanguageModel
from proximo.ppo.trainer import PPOTrainer
from proximo.records import Response, Scored
from proximo.rewards.verifier_reward import VerifierReward
from proximo_verifiers.verifier import Answer, Grade, Verifier
from records_made import response


class Sleeper(Verifier):
    """Verifiers in so many seconds, without a core."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def grade(self, answer: Answer) -> Grade:
        """Its length."""
        time.sleep(self.seconds)
        return Grade(score=float(len(answer.text)))


class Late:
    """The same source, told of nothing before sampling has ended."""

    name = "late"

    def __init__(self, source: VerifierReward) -> None:
        self.source = source

    def score(self, responses: Sequence[Response]) -> list[Scored]:
        """As the source."""
        return self.source.score(responses)


def step_seconds(early: bool, *, seconds: float, num_steps: int) -> tuple[float, float]:
    """Means over the steps after the first: of sampling, and of what is left to score."""
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    policy = LanguageModel(LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=256, **shape)))
    source = VerifierReward("grading_overlap:Sleeper", name="sleeper", num_workers=2, options={"seconds": seconds})
    options = {"max_new_tokens": 48, "stop_token_ids": (6, 7, 8), "max_rows": 16}
    config = PPOConfig(num_steps=num_steps, prompts_per_step=64, rollout=options, kl="none")
    trainer = PPOTrainer(policy, tiny_tokenizer(), reward=source if early else Late(source), config=config)
    try:
        history = trainer.train([f"{'abcdefgh'[n % 8]}{'ijklmnop'[n // 8]}" for n in range(64)])[1:]
    finally:
        source.close()
    names = ("time/rollout_seconds", "time/score_seconds")
    rollout, score = (sum(line[name] for line in history) / len(history) for name in names)
    return rollout, score


def answers_per_second(num_answers: int = 20_000) -> float:
    """Of one worker whose verifier takes no time: what the pool costs."""
    source = VerifierReward("grading_overlap:Sleeper", name="sleeper", num_workers=1, options={"seconds": 0.0})
    batch = [response(text=str(n)) for n in range(num_answers)]
    try:
        start = time.perf_counter()
        source.score(batch)
        return num_answers / (time.perf_counter() - start)
    finally:
        source.close()


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--milliseconds", type=float, default=5.0)
    parser.add_argument("--steps", type=int, default=4)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for early in (False, True):
        rollout, score = step_seconds(early, seconds=given.milliseconds / 1000, num_steps=given.steps)
        when = "as responses end" if early else "after sampling"
        print(f"begun {when}: sampling {rollout:.3f} s, scoring after it {score:.3f} s")
    print(f"{answers_per_second():,.0f} answers per second through one worker")


if __name__ == "__main__":
    main()
