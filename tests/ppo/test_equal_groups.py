"""Groups whose outcomes are all equal: counted by the raw outcome, and left out of the loss and what divides it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from builders import tiny_language_model
from ppo_trainers import all_weights, ppo_trainer
from proximo.algorithms.group_baselines import zero_variance_groups
from proximo.config.ppo.options import PPOConfig
from proximo.errors import ConfigError, TrainingError
from proximo.ppo.experience import task_reward_of
from proximo.ppo.step_arguments import as_prompts
from proximo.ppo.trainer import PPOTrainer
from proximo.records import Prompt, Scored, ScoreState
from records_made import prompt, response

COMPARING = ("group_centred", "group_standardised", "leave_one_out", "group_return_to_go")
ANSWERS = ((7, 8, 2), (9, 2), (10, 11, 12, 2))
NOISE = (0.3, -0.2, 0.05)
"""What a reward of form adds to answers that are all wrong."""


def trainer(**options: Any) -> PPOTrainer:
    """In float64, so that two ways of computing one gradient agree to the last digits."""
    model = tiny_language_model("gpt2", n_embd=16, n_layer=1, n_head=2, dtype=torch.float64, initializer_range=0.5)
    sizes = {"num_steps": 3, "prompts_per_step": 3, "responses_per_prompt": 3, "minibatch_responses": 9}
    optimizer = {"learning_rate": 1e-3, "max_gradient_norm": None, "weight_decay": 0.1}
    base = {"epochs_per_step": 1, "task_reward": "right", "policy_optimizer": optimizer}
    return ppo_trainer(model, **(sizes | base | options))


def group(asked: Prompt, outcomes: Sequence[float], noise: Sequence[float] = NOISE) -> list[Scored]:
    """Three answers to a prompt; the score is the outcome and something for the form."""
    return [
        Scored(
            response=replace(response(ids, to=asked), sample_index=index, logprobs=torch.empty(0)),
            score=outcome + extra,
            components={"right": outcome, "form": extra},
        )
        for index, (ids, outcome, extra) in enumerate(zip(ANSWERS, outcomes, noise, strict=True))
    ]


def take(made: PPOTrainer, batch: Sequence[Scored]) -> tuple[Tensor | None, dict[str, Any]]:
    """The gradient that the optimizer got, None where it took no step, and the metrics."""
    caught: list[Tensor] = []
    learner = made.learners["policy"]
    hook = learner.optimizer.register_step_pre_hook(
        lambda *_: caught.append(torch.cat([p.grad.flatten() for p in learner.parameters.values()]))  # type: ignore[union-attr]
    )
    responses = made.roles.policy.with_logprobs([each.response for each in batch])
    ready = [
        Scored(response=r, score=s.score, components=s.components, state=s.state)
        for r, s in zip(responses, batch, strict=True)
    ]
    outcome = made.run_step(scored=ready)
    hook.remove()
    metrics = {name: value.value for name, value in made.metrics(outcome).items()}
    return (caught[0] if caught else None), metrics


def prompts(made: PPOTrainer) -> list[Prompt]:
    return as_prompts(made.tokenizer, ["ab", "cde", "f"])


def test_groups_are_equal_by_their_valid_outcomes_alone() -> None:
    outcomes = torch.tensor([0.0, 1.0, 0.0, 5.0, float("nan"), 1.0, 2.0, 2.0])
    groups = torch.tensor([0, 1, 0, 2, 0, 1, 3, 3])
    valid = torch.tensor([True, True, True, True, False, True, True, False])
    assert zero_variance_groups(outcomes, groups, valid).tolist() == [True] * 8
    outcomes[5] = 0.0
    assert zero_variance_groups(outcomes, groups, valid).tolist() == [True, False, True, True, True, False, True, True]


@pytest.mark.parametrize("advantage", COMPARING)
def test_noise_of_form_in_groups_that_all_fail_teaches_nothing_once_they_are_excluded(advantage: str) -> None:
    """The phantom advantage: kept, the noise of all-fail groups is a gradient; excluded, no weight moves at all."""
    kept = trainer(advantage=advantage)
    batch = [each for asked in prompts(kept) for each in group(asked, (0, 0, 0))]
    gradient, metrics = take(kept, batch)
    assert gradient.norm() > 1e-2
    assert (metrics["group/effective_fraction"], metrics["group/zero_variance_fraction"]) == (0.0, 1.0)
    made = trainer(advantage={"kind": advantage, "zero_variance_groups": "exclude"})
    before = all_weights(made.policy.model)
    gradient, metrics = take(made, batch)
    assert gradient is None
    assert torch.equal(all_weights(made.policy.model), before), "neither momentum nor weight decay may move them"
    assert made.policy_version == 0
    assert (metrics["group/effective_fraction"], metrics["group/zero_variance_fraction"]) == (0.0, 1.0)
    assert metrics["score/mean"] == pytest.approx(sum(NOISE) / 3)
    assert metrics["score/task_reward_mean"] == 0
    assert "policy/loss" not in metrics
    gradient, _ = take(made, [each for asked in prompts(made) for each in group(asked, (0, 1, 0))])
    assert gradient is not None, "the next step goes on"


@pytest.mark.parametrize(
    ("advantage", "aggregation", "standardise", "kl"),
    [
        ("group_centred", "token_mean", False, "none"),
        ("group_centred", "constant", True, "loss"),
        ("group_standardised", "response_mean", False, "loss"),
        ("group_standardised", "token_mean", True, "reward"),
        ("leave_one_out", "constant", False, "reward"),
        ("group_return_to_go", "response_mean", True, "reward"),
    ],
    ids=str,
)
def test_the_gradient_is_that_of_the_batch_without_the_group(
    advantage: str, aggregation: str, standardise: bool, kl: str
) -> None:
    options = {
        "policy_loss": {"aggregation": aggregation, "entropy_coefficient": 0.1},
        "kl": "none" if kl == "none" else {"kind": kl, "coefficient": 0.3},
        "advantage": {"kind": advantage, "zero_variance_groups": "exclude", "standardise": standardise},
    }
    asked = prompts(trainer())
    mixed = [*group(asked[0], (0, 1, 0)), *group(asked[1], (1, 1, 0), noise=(0.1, 0.4, -0.3))]
    whole, metrics = take(trainer(**options), [*mixed[:3], *group(asked[2], (1, 1, 1)), *mixed[3:]])
    without, _ = take(trainer(**options), mixed)
    assert whole is not None
    assert without is not None
    torch.testing.assert_close(whole, without, rtol=0, atol=1e-12)
    assert metrics["group/effective_fraction"] == pytest.approx(2 / 3)
    options["advantage"]["zero_variance_groups"] = "keep"
    kept, _ = take(trainer(**options), [*mixed[:3], *group(asked[2], (1, 1, 1)), *mixed[3:]])
    assert kept is not None
    assert (kept - without).norm() > 1e-4


def test_the_outcome_is_a_component_as_its_source_gave_it_and_the_score_without_a_name() -> None:
    """Shaping makes no group unequal: penalties and the running scale change rewards, and not what was solved."""
    shaped = {"missing_eos_penalty": 1.0, "normalise": "standardise", "overlong_buffer_tokens": 100}
    excluded = {"kind": "group_centred", "zero_variance_groups": "exclude"}
    made = trainer(advantage=excluded, task_reward=None, score=shaped, rollout={"max_new_tokens": 128})
    batch = [each for asked in prompts(made) for each in group(asked, (0, 0, 0), noise=(0, 0, 0))]
    gradient, metrics = take(made, batch)
    assert (gradient, metrics["group/effective_fraction"]) == (None, 0.0)
    one = group(prompt(), (0.25, 0, 0))[0]
    assert (task_reward_of(one, "right"), task_reward_of(one, None)) == (0.25, 0.55)
    with pytest.raises(ConfigError, match=r"ppo\.task_reward is maths, but .* it gave: form, right"):
        task_reward_of(one, "maths")


def test_an_answer_at_fault_of_which_the_source_said_no_part_has_not_solved_its_task() -> None:
    fault = Scored(response=response(), score=-1.0, state=ScoreState.MODEL_FAULT)
    assert (task_reward_of(fault, "right"), task_reward_of(fault, None)) == (0.0, -1.0)


def test_responses_that_could_not_be_scored_have_no_say_in_whether_a_group_is_equal() -> None:
    made = trainer(advantage={"kind": "group_centred", "zero_variance_groups": "exclude"})
    lost = ScoreState.INFRASTRUCTURE_FAULT
    first, second, _ = prompts(made)
    batch = [*group(first, (0, 0, 1)), *group(second, (0, 1, 1))]
    batch[2] = Scored(response=batch[2].response, score=float("nan"), state=lost)
    _, metrics = take(made, batch)
    assert metrics["group/zero_variance_fraction"] == 0.5
    assert metrics["group/effective_fraction"] == pytest.approx(3 / 5)
    empty = [Scored(response=each.response, score=float("nan"), state=lost) for each in batch]
    with pytest.raises(TrainingError, match="no response has a token that counts"):
        take(made, empty)


def test_a_dead_verifier_is_seen_behind_a_reward_of_form() -> None:
    """All scores differ, but the outcome is one number step after step."""

    def formal(responses: Sequence[str], metadata: Any) -> list[dict[str, float]]:
        return [{"score": index / 10, "right": 0.0} for index in range(len(responses))]

    made = trainer(advantage="group_centred", guards={"max_constant_reward_steps": 2}, rollout={"max_new_tokens": 4})
    with pytest.raises(TrainingError, match="all scores of 2 steps in a row are 0"):
        made.train(["ab", "cde", "f"], reward=formal)


def test_only_estimators_that_compare_groups_can_leave_them_out() -> None:
    for estimator in ("gae", "return_to_go"):
        with pytest.raises(ValueError, match=f"zero_variance_groups is for kind .*, and this is of kind {estimator}"):
            PPOConfig(advantage={"kind": estimator, "zero_variance_groups": "exclude"})  # type: ignore[arg-type]
