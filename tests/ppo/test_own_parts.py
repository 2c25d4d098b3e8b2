"""Parts of the algorithm that a user brings, each made here in a few lines, without touching the package."""

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor

from builders import tiny_language_model, tiny_tokenizer
from ppo_trainers import PROMPTS, count_a_and_letters
from proximo.algorithms.objectives import TokenLosses
from proximo.config.ppo.advantage import AdvantageConfig
from proximo.config.ppo.losses import PolicyLossConfig
from proximo.config.ppo.objectives import CISPOConfig, GSPOConfig, M2POConfig, ObjectiveConfig, SAPOConfig
from proximo.config.ppo.options import PPOConfig
from proximo.config.ppo.rewards import RewardKLConfig
from proximo.ppo.trainer import PPOTrainer


def unclipped(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, scale: float) -> TokenLosses:
    """-scale r A."""
    loss = -scale * (logprobs - old_logprobs).exp() * advantages
    return TokenLosses(loss=loss, clipped=torch.zeros_like(advantages, dtype=torch.bool))


class UnclippedConfig(ObjectiveConfig):
    """The plain ratio, without any bound."""

    kind: Literal["unclipped"] = "unclipped"
    scale: float = 1.0

    @property
    def formula(self) -> Callable[..., Any]:
        return unclipped


def trained(objective: Any) -> Tensor:
    rates = {"policy_optimizer": {"learning_rate": 1e-2}, "minibatch_responses": 2}
    config = PPOConfig(num_steps=2, prompts_per_step=4, rollout={"max_new_tokens": 5}, **rates)
    config = PPOConfig(**{**dict(config), "policy_loss": {"objective": objective}})
    made = PPOTrainer(tiny_language_model(), tiny_tokenizer(), config=config)
    made.train(PROMPTS, reward=count_a_and_letters)
    return torch.cat([parameter.detach().flatten() for parameter in made.policy.model.parameters()])


def test_an_objective_of_ones_own_trains_as_its_formula_says() -> None:
    own = trained(UnclippedConfig())
    torch.testing.assert_close(own, trained({"clip_low": 1.0, "clip_high": 1e6}), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(own, trained({"clip_low": 1e-3, "clip_high": 1e-3}), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(own, trained(UnclippedConfig(scale=-1.0)), rtol=1e-5, atol=1e-6)


class AboveMedianConfig(AdvantageConfig):
    """1 for the better half of a prompt's responses, else -1, times a factor."""

    needs_groups: ClassVar[bool] = True
    kind: Literal["above_median"] = "above_median"
    factor: float = 1.0

    def estimate(self, step: Any) -> tuple[Tensor, None]:
        better = [
            score > step.whole_returns[step.group_ids == group].median()
            for score, group in zip(step.whole_returns, step.group_ids, strict=True)
        ]
        return step.to_tokens(self.factor * (2.0 * torch.stack(better).float() - 1.0)), None


def test_an_estimator_of_ones_own_trains_without_a_critic_and_compares_groups() -> None:
    options = {"num_steps": 1, "prompts_per_step": 2, "rollout": {"max_new_tokens": 5}}
    config = PPOConfig(responses_per_prompt=4, advantage=AboveMedianConfig(factor=3.0), **options)
    assert config.model_dump()["advantage"]["factor"] == 3.0
    made = PPOTrainer(tiny_language_model(), tiny_tokenizer(), config=config)
    (line,) = made.train(PROMPTS[:2], reward=count_a_and_letters)
    assert "group/zero_advantage_fraction" in line
    assert "value/loss" not in line
    assert line["advantage/std"] == pytest.approx(3.0, abs=1.0)
    with pytest.raises(ValueError, match="advantage above_median compares responses"):
        PPOConfig(advantage=AboveMedianConfig())


def test_an_object_is_not_replaced_by_what_an_objective_implies() -> None:
    loss = {"objective": "online_dpo"}
    with pytest.raises(ValueError, match="needs to know which of two responses is better"):
        PPOConfig(policy_loss=loss, advantage=AboveMedianConfig(factor=2.0))
    with pytest.raises(ValueError, match="leave out kl.kind, which is then margin"):
        PPOConfig(policy_loss=loss, kl=RewardKLConfig(coefficient=0.1))
    ranking = type("RankingConfig", (AboveMedianConfig,), {"ranks_pairs": True})()
    assert PPOConfig(policy_loss=loss, advantage=ranking).advantage is ranking


def test_an_objective_of_ones_own_stays_where_other_options_are_implied() -> None:
    loss = PolicyLossConfig(objective=UnclippedConfig(scale=3.0))
    config = PPOConfig(policy_loss=loss, rollout={"staleness": 1})
    assert config.policy_loss.objective == UnclippedConfig(scale=3.0)
    assert config.policy_loss.behaviour_weight is not None
    assert config.model_dump()["policy_loss"]["objective"] == {"kind": "unclipped", "scale": 3.0}


def test_the_defaults_of_the_objectives_are_those_of_their_papers() -> None:
    assert GSPOConfig().options == {"clip_low": 3e-4, "clip_high": 4e-4}
    assert SAPOConfig().options == {"gate_positive": 1.0, "gate_negative": 1.05}
    assert CISPOConfig().options == {"clip_low": 1.0, "clip_high": 0.2}
    assert M2POConfig().second_moment_limit == 0.04


def test_a_section_of_another_base_is_no_objective() -> None:
    with pytest.raises(ValueError, match="policy_loss.objective"):
        PPOConfig(policy_loss={"objective": PPOConfig()})
