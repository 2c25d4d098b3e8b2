"""Normalised values: the critic learns the same from scores of any size, and rescaling it moves no value."""

import pytest
import torch
from torch import Tensor

from builders import tiny_language_model, tiny_tokenizer
from proximo.config.ppo.options import PPOConfig
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions
from proximo.models.scalar import HeadStart, ScalarModel, scalar_from_language_model
from proximo.ppo.trainer import PPOTrainer

PROMPTS = ["ab", "cde", "f", "gh"]
KINDS = ["exponential", "cumulative"]


def critic(start: HeadStart) -> ScalarModel:
    return scalar_from_language_model(LanguageModel(tiny_language_model(seed=3)), start, seed=4)


def trainer(*, value: ScalarModel | None = None, normalise: str = "cumulative", lam: float = 1.0, **options):
    base = {
        "num_steps": 3,
        "prompts_per_step": 4,
        "responses_per_prompt": 2,
        "epochs_per_step": 1,
        "rollout": {"max_new_tokens": 6},
        "kl": "none",
        "advantage": {"gae_lambda": lam},
        "policy_optimizer": {"learning_rate": 1e-3},
        "value_optimizer": {"learning_rate": 1e-2},
        "value_loss": {"normalise": normalise},
    }
    config = PPOConfig(**(base | options))
    return PPOTrainer(tiny_language_model(), tiny_tokenizer(), value=value, config=config)


def scores_of(texts: list[str]) -> list[float]:
    return [text.count("a") + 0.5 * (len(text) % 4) for text in texts]


def learn(made: PPOTrainer, *, factor: float = 1.0, shift: float = 0.0) -> tuple[list[dict[str, float]], Tensor]:
    """Metrics of the run, and the values of fixed responses after it."""

    def reward(prompts, responses, metadata):
        return [factor * score + shift for score in scores_of(responses)]

    history = made.train(PROMPTS, reward=reward)
    return history, values_of(made)


def values_of(made: PPOTrainer) -> Tensor:
    return made.roles.value.values(fixed_responses())


def fixed_responses():
    return trainer().generate(PROMPTS)


@pytest.mark.parametrize(("normalise", "start"), list(zip(KINDS, HeadStart, strict=True)))
def test_scores_of_a_thousandfold_size_teach_the_same(normalise: str, start: HeadStart) -> None:
    """Where the critic claims anything, that of the second run begins a thousandfold larger too."""
    small, large = (trainer(normalise=normalise, value=critic(start)) for _ in range(2))
    large.roles.value.model.scale_head(1000.0)
    (_, values), (history, large_values) = learn(small), learn(large, factor=1000.0)
    torch.testing.assert_close(large_values, 1000 * values, rtol=0, atol=0.2)
    for name, weight in small.policy.model.named_parameters():
        torch.testing.assert_close(large.policy.model.get_parameter(name), weight, rtol=0, atol=1e-5)
    assert values.std() > 0.003
    assert history[-1]["value/scale"] > 100


def test_without_normalising_the_size_of_the_scores_matters() -> None:
    """So that the test above could fail."""
    (_, values), (_, large_values) = (learn(trainer(normalise=None), factor=f) for f in (1.0, 1000.0))
    assert (large_values - 1000 * values).abs().max() > 50


@pytest.mark.parametrize("normalise", KINDS)
def test_a_critic_that_claims_nothing_is_given_the_mean_of_the_scores(normalise: str) -> None:
    """With lambda 1 returns are scores, so a constant on all of them is one on all values, and nothing else changes."""
    (history, values), (shifted, shifted_values) = (learn(trainer(normalise=normalise), shift=s) for s in (0.0, 50.0))
    torch.testing.assert_close(shifted_values, values + 50, rtol=0, atol=1e-3)
    assert shifted[0]["value/shift"] == pytest.approx(history[0]["value/shift"] + 50)
    assert shifted[0]["value/shift"] == pytest.approx(shifted[2]["value/shift"])
    assert shifted[0]["value/clip_fraction"] == pytest.approx(history[0]["value/clip_fraction"])


@pytest.mark.parametrize(("normalise", "adapter"), [("exponential", False), ("cumulative", True)])
def test_the_head_is_rescaled_so_that_no_value_changes(normalise: str, adapter: bool) -> None:
    value = critic(HeadStart.NORMAL)
    made = trainer(value=value.with_adapter(LoRAOptions(rank=2)) if adapter else value, normalise=normalise)
    before, mask = values_of(made), torch.ones(4, dtype=torch.bool)
    scales = []
    for returns in ([1.0, 2.0, 3.0, 9.0], [50.0, -70.0, 80.0, 90.0], [0.1, 0.2, 0.1, 0.1]):
        said, wanted = made.roles.value.scale.follow(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor(returns), mask)
        scales.append(made.roles.value.scale.units.scale)
        torch.testing.assert_close(values_of(made), before, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(said, torch.tensor([1.0, 2.0, 3.0, 4.0]) / scales[-1])
        torch.testing.assert_close(wanted, torch.tensor(returns) / scales[-1])
    assert len(set(scales)) == 3
    assert made.roles.value.scale.units.shift == 0


def test_the_loss_is_counted_in_deviations_of_the_returns() -> None:
    made = trainer(value=critic(HeadStart.NORMAL), value_loss={"normalise": "cumulative", "clip": None}, num_steps=1)
    responses = made.generate(PROMPTS)
    values = made.roles.value.values(responses)
    scores = scores_of([r.text for r in responses])
    lengths = [len(r.token_ids) for r in responses]
    # With lambda 1 the return of every token is the score of its response.
    returns = [score for score, length in zip(scores, lengths, strict=True) for _ in range(length)]
    own = [float(v) for piece in values.split([n + 1 for n in lengths]) for v in piece[:-1]]
    mean = sum(returns) / len(returns)
    variance = sum((r - mean) ** 2 for r in returns) / len(returns)
    optimizer = {"learning_rate": 1e-12}
    made = trainer(
        value=critic(HeadStart.NORMAL),
        value_loss={"normalise": "cumulative", "clip": None},
        value_optimizer=optimizer,
        num_steps=1,
    )
    line = made.step(PROMPTS, responses, scores)
    squares = [(v - r) ** 2 for v, r in zip(own, returns, strict=True)]
    assert line["value/scale"] == pytest.approx(variance**0.5, rel=1e-6)
    assert line["value/loss"] == pytest.approx(0.5 * sum(squares) / len(squares) / variance, rel=1e-4)


def test_the_clip_holds_the_first_values_of_a_critic_that_claims_nothing_to_what_it_says_then() -> None:
    """Its values jump to the mean of the returns before it learns; the jump must not be taken for a move of its own."""
    made = trainer(value_optimizer={"learning_rate": 1e-12}, value_loss={"normalise": "cumulative", "clip": 1e-3})
    history, _ = learn(made, shift=100.0)
    assert history[0]["value/clip_fraction"] == 0


def test_answers_that_do_not_count_move_no_moments() -> None:
    made = trainer(value=critic(HeadStart.NORMAL))
    values, returns = torch.zeros(3), torch.tensor([1.0, float("nan"), 4.0])
    made.roles.value.scale.follow(values, returns, torch.tensor([True, False, True]))
    assert (made.roles.value.scale.moments.mean, made.roles.value.scale.moments.variance) == (2.5, 2.25)
    kept = made.roles.value.scale.state()
    made.roles.value.scale.follow(values, returns, torch.zeros(3, dtype=torch.bool))
    assert made.roles.value.scale.state() == kept


def test_values_that_are_not_normalised_are_left_alone() -> None:
    made = trainer(value=critic(HeadStart.NORMAL), normalise=None)
    before, returns = values_of(made), torch.tensor([3.0, 30.0])
    said, wanted = made.roles.value.scale.follow(torch.ones(2), returns, torch.ones(2, dtype=torch.bool))
    assert said.tolist() == [1, 1]
    assert wanted is returns
    assert values_of(made).equal(before)
