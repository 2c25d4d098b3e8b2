"""Answers of no token, and of an end-of-sequence token alone, go through every estimator and every option."""

import math
from functools import partial
from itertools import cycle

import pytest
import torch

from builders import tiny_language_model
from ppo_trainers import ppo_trainer
from proximo.config.ppo.advantage import Advantage
from proximo.config.schema.fields import kinds_of, sections_of
from proximo.errors import TrainingError
from proximo.models.language import LanguageModel
from proximo.models.scalar import HeadStart, scalar_from_language_model
from proximo.ppo.trainer import PPOTrainer
from proximo.records import Scored
from proximo.rewards.function import FunctionReward
from proximo.rewards.model import ModelReward

EOS = 2
PROMPTS = ["ab", "cde", "f"]
ANSWERS = [[], [EOS], [7, 8, EOS], [EOS], [], []]
"""Two to each prompt: one group without a long answer, one without any token."""
SHAPED = {
    "normalise": "standardise",
    "clip": 1.0,
    "missing_eos_penalty": 1.0,
    "min_tokens": 2,
    "min_tokens_penalty": 1.0,
    "overlong_buffer_tokens": 2,
}


trainer = partial(ppo_trainer, num_steps=1, prompts_per_step=3, responses_per_prompt=2, minibatch_responses=2)


SCORED_BY_OTHERS = [kind for s in sections_of(Advantage) for kind in kinds_of(s) if not s.needs_greedy]
"""Estimators that need no score but those of the responses."""


def assert_finite(line: dict[str, float], made: PPOTrainer) -> None:
    assert all(math.isfinite(value) for value in line.values()), line
    assert all(bool(weight.isfinite().all()) for weight in made.policy.model.parameters())
    assert line["policy/skipped_updates"] == 0


@pytest.mark.parametrize(("estimator", "score"), list(zip(SCORED_BY_OTHERS, cycle([{}, SHAPED]), strict=False)))
def test_every_estimator_takes_them(estimator: str, score: dict) -> None:
    made = trainer(advantage=estimator, score=score)
    assert_finite(made.step(PROMPTS, ANSWERS, [0.5, 1.0, 2.0, -1.0, 0.0, 3.0]), made)


@pytest.mark.parametrize(
    "options",
    [
        {"truncation": "mask"},
        {"score": {"whiten_rewards": "zero_mean"}},
        {"truncation": "bootstrap"},
        {"value_loss": {"normalise": "exponential"}},
        {"advantage": {"length_adaptive": 0.05}},
        {"kl": {"estimator": "full"}},
        {"policy_loss": {"aggregation": "response_mean"}},
        {"policy_loss": {"objective": "gspo", "entropy_coefficient": 0.1}},
        {"policy_loss": {"objective": "m2po"}},
        {"responses_per_prompt": 1, "samples_per_prompt": 2},
    ],
    ids=str,
)
def test_every_option_takes_them(options: dict) -> None:
    made = trainer(**options)
    assert_finite(made.step(PROMPTS, ANSWERS, [0.5, 1.0, 2.0, -1.0, 0.0, 3.0]), made)


def test_rewards_of_tokens_may_be_none_at_all() -> None:
    made = trainer()
    line = made.step(PROMPTS, ANSWERS, [[0.5] * len(answer) for answer in ANSWERS])
    assert_finite(line, made)
    assert line["score/mean"] == pytest.approx(2.5 / 6)


def test_an_answer_without_a_token_has_no_part_in_any_loss_and_one_of_its_end_alone_is_trained() -> None:
    """The end of sequence at once is a choice of the policy, an empty list is none: there is nothing to reinforce."""
    without, with_empty = trainer(advantage="return_to_go"), trainer(advantage="return_to_go")
    first = without.step(["ab", "f"], [[EOS], [7, EOS]], [1.0, -1.0])
    second = with_empty.step(["ab", "c", "f"], [[EOS], [], [7, EOS]], [1.0, 50.0, -1.0])
    for one, other in zip(without.policy.model.parameters(), with_empty.policy.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert first["policy/loss"] == second["policy/loss"]
    fresh = tiny_language_model()
    assert any(
        not torch.equal(a, b) for a, b in zip(without.policy.model.parameters(), fresh.parameters(), strict=True)
    )


def test_a_step_of_nothing_else_says_so() -> None:
    with pytest.raises(TrainingError, match="no response has a token that counts; all 3 were empty"):
        trainer(responses_per_prompt=1).step(PROMPTS, [[], [], []], [1.0, 1.0, 1.0])


def test_every_source_scores_them() -> None:
    made = trainer()
    responses = made._adopt(PROMPTS, ANSWERS, None)
    model = scalar_from_language_model(LanguageModel(tiny_language_model()), HeadStart.NORMAL)
    found: list[Scored] = [*ModelReward(model).score(responses), *ModelReward(model, dense="deltas").score(responses)]
    found += FunctionReward(lambda responses: [float(len(text)) for text in responses]).score(responses)
    assert all(each.valid and math.isfinite(each.score) for each in found)
    assert [each.response.text for each in found[:2]] == ["", ""]
