"""Answers without a token among those of a step: they teach nothing, break nothing, and alone they are refused."""

import pytest
import torch

from builders import tiny_language_model, tiny_tokenizer
from proximo.config.ppo import PPOConfig
from proximo.errors import TrainingError
from proximo.trainers.ppo import PPOTrainer

ANSWER = [7, 8, 2]


def weights_after(answers: list[list[int]]) -> tuple[torch.Tensor, dict[str, float]]:
    """The policy after one step in which each answer scores 1; advantages are as they come, so that they compare."""
    plain = {"advantage": {"estimator": "gae", "standardise": False}, "epochs_per_step": 1, "minibatch_responses": 1}
    config = PPOConfig(prompts_per_step=len(answers), policy_optimizer={"learning_rate": 1e-2}, **plain)  # type: ignore[arg-type]
    trainer = PPOTrainer(tiny_language_model(num_hidden_layers=1), tiny_tokenizer(), config=config)
    line = trainer.step(["ab"] * len(answers), answers, [1.0] * len(answers))
    return torch.cat([p.detach().flatten() for p in trainer.policy.model.parameters()]), line


def test_a_step_with_an_empty_answer_learns_what_it_learns_without_it() -> None:
    alone, line = weights_after([ANSWER])
    beside, line_beside = weights_after([[], ANSWER])
    untouched = torch.cat([p.detach().flatten() for p in tiny_language_model(num_hidden_layers=1).parameters()])
    torch.testing.assert_close(beside, alone, rtol=0, atol=1e-6)
    assert (alone - untouched).abs().max() > 1e-3
    assert line_beside["policy/loss"] == pytest.approx(line["policy/loss"], abs=1e-6)


def test_a_step_of_empty_answers_alone_is_refused() -> None:
    with pytest.raises(TrainingError, match="all 2 were empty"):
        weights_after([[], []])
