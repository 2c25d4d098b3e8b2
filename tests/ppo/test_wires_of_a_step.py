"""What a step remembers and what may stop it reach their formulas, by value: the coefficient of the KL as it is now,
moments, averages, units of the values, guards. Settings differ from each other and from their defaults."""

import math
from dataclasses import replace
from statistics import fmean, pstdev, stdev
from typing import Any

import pytest
import torch

from builders import tiny_language_model
from ppo.test_wires_of_losses import batch
from ppo_trainers import ppo_trainer
from proximo.algorithms.advantages import RunningMoments, return_spread
from proximo.config.ppo.losses import ValueLossConfig
from proximo.config.ppo.rewards import AdaptiveKLConfig
from proximo.errors import TrainingError
from proximo.models.language import LanguageModel
from proximo.models.scalar import HeadStart, scalar_from_language_model
from proximo.ppo.roles.value import ValueScale
from proximo.ppo.step_arguments import as_prompts
from proximo.ppo.train_state import adapted_coefficient
from proximo.ppo.trainer import PPOTrainer
from proximo.records import Response
from proximo.rewards.function import FunctionReward
from records_made import response
from roles_made import state

PROMPTS = ["ab", "cde"]
TOKENS = [[10, 11, 2], [12, 13], [14, 15, 16, 2], [17, 2]]
SCORES = [1.0, -1.0, 0.5, 0.25]


def trainer(**options: Any) -> PPOTrainer:
    """Four responses to two prompts, one update of one epoch, and a reference that is another model."""
    base = {"num_steps": 3, "prompts_per_step": 2, "responses_per_prompt": 2, "minibatch_responses": 4}
    still = {"policy_optimizer": {"learning_rate": 1e-12}, "epochs_per_step": 1}
    policy, reference = (tiny_language_model(seed=seed) for seed in (2, 1))
    return ppo_trainer(policy, reference=reference, **(base | still | options))


def responses(made: PPOTrainer) -> list[Response]:
    asked = as_prompts(made.tokenizer, PROMPTS)
    given = [response(ids, to=asked[i // 2]) for i, ids in enumerate(TOKENS)]
    return [replace(each, sample_index=i % 2, logprobs=torch.empty(0)) for i, each in enumerate(given)]


def nats(made: PPOTrainer) -> list[list[float]]:
    """k1 of each token of each response."""
    given = responses(made)
    difference = made.roles.policy.logprobs(given) - made.roles.reference.logprobs(given)[0]
    return [part.tolist() for part in difference.split([len(ids) for ids in TOKENS])]


NOW = 0.37
"""What a nat costs by now; the recipe begins at 0.2."""


def test_a_kl_in_the_reward_costs_what_it_has_come_to_cost() -> None:
    """Without a critic and undiscounted, a first token has its score less the KL of the whole response."""
    advantage = {"kind": "return_to_go", "standardise": False}
    made = trainer(kl={"coefficient": 0.2}, advantage=advantage)
    assert made.state.kl_coefficient == 0.2
    made.state = replace(made.state, kl_coefficient=NOW)
    line, each = made.step(PROMPTS, responses(made), SCORES), nats(made)
    wanted = [score - NOW * sum(part) for score, part in zip(SCORES, each, strict=True)]
    assert line["reward/mean"] == pytest.approx(fmean(wanted), rel=1e-5)
    assert line["kl/coefficient"] == NOW


@pytest.mark.parametrize("value", [None, "trunk"])
def test_a_kl_in_the_loss_costs_what_it_has_come_to_cost(value: str | None) -> None:
    """Standardised advantages have a mean of 0, and so has the loss of PPO at a ratio of 1: the KL is left."""
    made = trainer(kl={"kind": "loss", "estimator": "k2", "coefficient": 0.2}, value=value)
    made.state = replace(made.state, kl_coefficient=NOW)
    line = made.step(PROMPTS, responses(made), SCORES)
    squares = [x * x / 2 for part in nats(made) for x in part]
    assert line["policy/loss"] == pytest.approx(NOW * fmean(squares), rel=1e-4)


@pytest.mark.parametrize("over", [1.1, 0.95, 3.0])
def test_the_coefficient_moves_by_its_target_and_horizon_from_where_it_is(over: float) -> None:
    made = trainer(kl={"coefficient": 0.2})
    assert made.state.kl_coefficient == 0.2
    observed = fmean(sum(part) for part in nats(made))
    config = made.config.kl.model_copy(
        update={"adaptive": AdaptiveKLConfig.model_construct(target=observed / over, horizon=50)}
    )
    experience = made.run_step(scored=_scored(made)).experience
    error = min(max(over - 1, -0.2), 0.2)
    assert adapted_coefficient(NOW, experience, config) == pytest.approx(NOW * (1 + error * 4 / 50), rel=1e-5)


def _scored(made: PPOTrainer) -> list[Any]:
    source = FunctionReward(lambda prompts, responses, metadata: SCORES, name="given")
    return list(source.score(made.roles.policy.with_logprobs(responses(made))))


def test_average_and_reference_follow_with_a_decay_each() -> None:
    made = trainer(
        average_decay=0.75,
        kl={"reference_every_steps": 2, "reference_decay": 0.3},
        policy_optimizer={"learning_rate": 1e-2},
    )
    models = made.policy, made.roles.average.model, made.roles.reference.model

    def weights() -> list[torch.Tensor]:
        all_of = [list(model.model.parameters()) for model in models if model]
        return [torch.cat([each.detach().double().flatten() for each in parameters]) for parameters in all_of]

    first, average, reference = weights()
    for step in (1, 2, 3):
        made.step(PROMPTS, responses(made), SCORES)
        policy, *found = weights()
        average = 0.75 * average + 0.25 * policy
        reference = 0.3 * reference + 0.7 * policy if step == 2 else reference
        torch.testing.assert_close(found, [average, reference], rtol=0, atol=1e-6)
    assert (policy - first).abs().max() > 1e-3


def test_returns_of_the_steps_before_are_what_least_spread_is_a_share_of() -> None:
    made = trainer(kl="none", advantage={"least_spread": 0.05}, score={"scale": 2.0, "normalise": "scale"})
    spreads = [made.run_step(scored=_scored(made)).made.raw_advantages.spread for _ in range(2)]
    doubled = [2 * score for score in SCORES]
    returns = [x / stdev(doubled * steps) for steps in (1, 2) for x in doubled]
    for seen, wanted in (
        (spreads[0].seen, returns[:4]),
        (spreads[1].seen, returns),
        (made.state.return_moments, returns),
    ):
        assert (seen.count, seen.mean) == (len(wanted), pytest.approx(fmean(wanted), rel=1e-6))
    assert made.state.score_moments.mean == pytest.approx(fmean(doubled))


@pytest.mark.parametrize(
    ("share", "returns", "is_flat"),
    [(0.05, (1.0, 1.048), True), (0.05, (1.0, 1.052), False), (0.0, (1.0, 1.0), True), (0.0, (1.0, 1.001), False)],
)
def test_a_step_is_flat_up_to_its_share_of_the_deviation_of_the_run(share: float, returns: Any, is_flat: bool) -> None:
    """Deviations of 0.024 and 0.026 beside 0.5."""
    seen = RunningMoments(count=10_001, mean=1.0, squares=10_000 * 0.5**2)
    rewards, mask = torch.tensor(returns, dtype=torch.float64), torch.ones(2, dtype=torch.bool)
    found = return_spread(rewards, mask, (1, 1), gamma=1.0, least=share, seen=seen)
    assert found.deviation == pytest.approx(pstdev(returns))
    assert found.is_flat is is_flat


STEPS = ([1.0, 2.0, 6.0], [-4.0, 9.0], [0.5, 0.5, 0.75, 8.0])


@pytest.mark.parametrize("normalise", [{"kind": "exponential", "decay": 0.6}, {"kind": "cumulative"}])
def test_the_unit_of_values_is_the_deviation_of_the_returns_as_they_are_weighed(normalise: Any) -> None:
    """Every step alike, and 0.6 of that after each further one; or every return alike."""
    model = scalar_from_language_model(LanguageModel(tiny_language_model()), HeadStart.NORMAL, seed=1)
    scale, kind = ValueScale(model, ValueLossConfig(normalise=normalise)), normalise["kind"]
    for number, returns in enumerate(STEPS):
        values = torch.zeros(len(returns))
        _, wanted = scale.follow(values, torch.tensor(returns), torch.ones(len(returns), dtype=torch.bool))
        seen = STEPS[: number + 1]
        weights = [0.6 ** (number - i) if kind == "exponential" else len(each) for i, each in enumerate(seen)]
        means = [fmean(each) for each in seen], [fmean(x * x for x in each) for each in seen]
        first, second = (sum(w * m for w, m in zip(weights, of, strict=True)) / sum(weights) for of in means)
        unit = math.sqrt(second - first**2)
        assert scale.units.scale == pytest.approx(unit, rel=1e-6)
        assert wanted.tolist() == pytest.approx([x / unit for x in returns], rel=1e-5)


def measured() -> tuple[float, float]:
    """The mean ratio and the mean k3 of the one minibatch of `batch`."""
    tokens = [token for each in batch()[2] for token in each]
    return fmean(t.ratio for t in tokens), fmean(t.ratio - 1 - math.log(t.ratio) for t in tokens)


@pytest.mark.parametrize(
    ("ratio", "kl", "target", "refused"),
    [
        (1.01, 1.01, 1.01, ""),
        (0.99, 1.01, 1.01, "max_ratio"),
        (1.01, 0.99, 1.01, "max_kl"),
        (1.01, 1.01, 0.99, "target_kl"),
        (1.01, 0.99, None, "max_kl"),
    ],
)
def test_each_guard_holds_its_own_number_against_its_own_limit(
    ratio: float, kl: float, target: float | None, refused: str
) -> None:
    mean_ratio, divergence = measured()
    assert mean_ratio * 0.99 > 1
    limits = {"max_ratio": ratio * mean_ratio, "max_kl": kl * divergence, "max_skipped_fraction": 1.0}
    if target is not None:
        limits["target_kl"] = target * divergence
    roles, experience, _ = batch(guards=limits)
    report = roles.policy.train(experience, state())
    assert [refused in reason for reason in report.refusals] == ([True] if refused else [])
    assert report.metrics["policy/skipped_updates"].value == float(refused in ("max_ratio", "max_kl"))
    if target is not None:
        assert report.metrics["policy/stopped_updates"].value == float(refused == "target_kl")


@pytest.mark.parametrize(("fraction", "stops"), [(0.3, True), (0.4, False)])
def test_a_third_of_the_updates_skipped_is_more_than_three_tenths(fraction: float, stops: bool) -> None:
    """Minibatches of two; of the first response the ratio is far from 1."""
    guards = {"max_skipped_fraction": fraction, "max_ratio": 50.0, "max_unscored_fraction": 0.9}
    roles, experience, _ = batch(guards=guards, minibatch_responses=2)
    experience.old_logprobs[: experience.lengths[0]] -= 9
    report = roles.policy.train(experience, state())
    assert report.metrics["policy/skipped_updates"].value == 1
    told = "step 1: 1 of 3 updates of the policy were skipped, more than ppo.guards.max_skipped_fraction = 0.3 allows"
    assert (report.guard or "").partition(";")[0] == (told if stops else "")


def test_the_skipped_updates_of_a_value_model_are_counted_by_themselves() -> None:
    roles, experience, _ = batch(guards={"max_skipped_fraction": 0.3}, minibatch_responses=2)
    experience.returns[0] = math.inf
    report = roles.value.train(experience, state())
    assert report.guard is not None
    assert "1 of 3 updates of the value were skipped" in report.guard
    assert "the loss is inf" in report.guard


@pytest.mark.parametrize(("fraction", "stops"), [(0.2, True), (0.3, False)])
def test_a_quarter_of_the_scores_missing_is_more_than_a_fifth(fraction: float, stops: bool) -> None:
    made = trainer(guards={"max_unscored_fraction": fraction, "max_skipped_fraction": 0.24})
    made.roles.reward.source = FunctionReward(lambda prompts, responses, metadata: [1.0, None, 2.0, 3.0], name="three")

    def score() -> Any:
        return made.roles.reward.score(responses(made), (), made.state)

    if stops:
        with pytest.raises(TrainingError, match=r"1 of 4 responses could not be scored.*max_unscored_fraction = 0.2"):
            score()
    else:
        assert [each.valid for each in score()] == [True, False, True, True]
