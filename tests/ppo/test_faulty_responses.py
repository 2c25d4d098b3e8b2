"""A response without a score leaves nothing behind: the step is that of the batch from which it was taken by hand."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from builders import tiny_language_model
from ppo.test_updates import Gathered
from proximo.config.ppo.options import PPOConfig
from proximo.models.language import LanguageModel
from proximo.models.scalar import HeadStart, scalar_from_language_model
from proximo.ppo.step import experience_of
from proximo.ppo.step_metrics import experience_metrics
from proximo.ppo.task import rows_to_log
from proximo.records import Passes, Scored, ScoreState
from records_made import prompt, response
from roles_made import outcome_of, roles_of, state

GROUPS = [(0, 3, 5), (0, 3, 2), (0, 3, 4), (1, 6, 1), (1, 6, 7), (1, 6, 3), (2, 2, 4), (2, 2, 6), (2, 2, 2)]
"""Prompt, its tokens, and the tokens of each of its three responses."""
SCORES = [0.0, 1.0, 5.0, 2.0, -1.0, 0.5, 3.0, 3.0, 1.0]
FAULTY = (1, 5, 6)
CRITIC = {"advantage": "gae"}
SETTINGS: dict[str, dict[str, Any]] = {
    "gae": CRITIC,
    "gae, not standardised": {"advantage": {"kind": "gae", "standardise": False}},
    "rewards whitened": CRITIC | {"score": {"whiten_rewards": "zero_mean"}},
    "rewards rescaled": CRITIC | {"score": {"whiten_rewards": "keep_mean"}},
    "running moments": CRITIC | {"score": {"normalise": "standardise"}},
    "group_centred": {"advantage": "group_centred"},
    "group_standardised": {"advantage": "group_standardised"},
    "leave_one_out": {"advantage": "leave_one_out"},
}


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, 60, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def batch(left_out: tuple[int, ...] = (), faulty: tuple[int, ...] = ()) -> list[Scored]:
    made = []
    for index, (asked, num_prompt, num_response) in enumerate(GROUPS):
        if index in left_out:
            continue
        fault = index in faulty
        question = prompt(str(asked), token_ids=ids(num_prompt, 50 + asked))
        made.append(
            Scored(
                response=response(ids(num_response, index), to=question),
                score=math.nan if fault else SCORES[index],
                state=ScoreState.INFRASTRUCTURE_FAULT if fault else ScoreState.SCORED,
            )
        )
    return made


def learn(scored: list[Scored], options: dict[str, Any], *, sizes: int) -> tuple[list[Tensor], dict[str, Any]]:
    """The gradients that policy and critic get from one update over all of it, and the metrics of the experience."""
    plain = {"prompts_per_step": 3, "responses_per_prompt": 3, "epochs_per_step": 1, "minibatch_responses": sizes}
    config = PPOConfig(**(plain | {"kl": {"kind": "reward", "coefficient": 0.1}} | options))
    policy = LanguageModel(tiny_language_model(dtype=torch.float64))
    value = scalar_from_language_model(policy, HeadStart.NORMAL, seed=1)
    frozen = LanguageModel(tiny_language_model(seed=9, dtype=torch.float64))
    learners = {"policy": Gathered(policy.model), "value": Gathered(value.model)}
    roles = roles_of(config, policy, reference=frozen, value=value, learners=dict(learners))
    responses = [each.response for each in scored]
    old, values = roles.policy.logprobs(responses), roles.value.values(responses)
    reference, _ = roles.reference.logprobs(responses)
    passes = Passes(old_logprobs=old, reference_logprobs=reference, values=values if config.uses_critic else None)
    made = experience_of(scored, passes, state(0.1), config=config)
    experience = made.experience
    roles.policy.train(experience, state(0.1))
    if config.uses_critic:
        roles.value.train(experience, state())
    found = [gradient for each in learners.values() for one in each.gradients for gradient in one.values()]
    return found, {name: metric.value for name, metric in experience_metrics(outcome_of(made), config).items()}


@pytest.mark.parametrize("setting", SETTINGS)
def test_gradients_and_statistics_are_those_of_the_batch_without_it(setting: str) -> None:
    options = SETTINGS[setting]
    found, counted = learn(batch(faulty=FAULTY), options, sizes=len(GROUPS))
    wanted, known = learn(batch(left_out=FAULTY), options, sizes=len(GROUPS) - len(FAULTY))
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.linalg.vector_norm(ours - theirs) <= 1e-10 * torch.linalg.vector_norm(theirs)
    assert counted.pop("response/unscored") == len(FAULTY)
    assert known.pop("response/unscored") == 0
    assert counted == pytest.approx(known, rel=1e-10)


@pytest.mark.parametrize("setting", ["gae", "group_centred"])
def test_it_would_matter_if_a_fault_were_a_score_of_0(setting: str) -> None:
    wrong = [each if each.valid else Scored(response=each.response, score=0.0) for each in batch(faulty=FAULTY)]
    found, _ = learn(wrong, SETTINGS[setting], sizes=len(GROUPS))
    wanted, _ = learn(batch(left_out=FAULTY), SETTINGS[setting], sizes=len(GROUPS) - len(FAULTY))
    distance = sum(float(torch.linalg.vector_norm(a - b)) for a, b in zip(found, wanted, strict=True))
    assert distance > 0.1 * sum(float(torch.linalg.vector_norm(each)) for each in wanted)


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, []), (2, [0, 3, 1]), (3, [0, 3, 6, 1]), (5, [0, 3, 6, 1, 4, 5]), (99, [0, 3, 6, 1, 4, 7, 2, 5, 8])],
)
def test_samples_are_of_several_prompts_and_one_without_a_score_is_among_them(count: int, shown: list[int]) -> None:
    assert rows_to_log(batch(faulty=FAULTY), count) == shown
