"""A KL controller of the caller's own keeps the coefficient of the trainer."""

import math
from collections.abc import Sequence

import pytest

from ppo_trainers import PROMPTS, lengths, ppo_trainer
from proximo.algorithms.controllers import AdaptiveKLController, KLController
from proximo.errors import ConfigError
from proximo.ppo.trainer import PPOTrainer


class Doubling:
    """Twice as dear after every step."""

    def __init__(self, coefficient: float = 0.1) -> None:
        self.coefficient = coefficient
        self.seen: list[list[float]] = []

    def update(self, kl_values: Sequence[float]) -> float:
        self.seen.append(list(kl_values))
        self.coefficient *= 2
        return self.coefficient


def trainer(controller: KLController | None, **options) -> PPOTrainer:
    return ppo_trainer(num_steps=3, kl_controller=controller, **options)


def test_it_is_asked_after_every_step_and_given_the_kl_of_each_response() -> None:
    controller = Doubling()
    history = trainer(controller).train(PROMPTS, reward=lengths)
    assert [line["kl/coefficient"] for line in history] == pytest.approx([0.1, 0.2, 0.4])
    for line, seen in zip(history, controller.seen, strict=True):
        assert len(seen) == 4
        assert line["kl/sequence"] == pytest.approx(sum(seen) / 4)


def test_the_adaptive_one_does_what_the_configuration_does() -> None:
    own = trainer(AdaptiveKLController(0.1, target=0.01, horizon=40))
    configured = trainer(None, kl={"coefficient": 0.1, "adaptive": {"target": 0.01, "horizon": 40}})
    assert [line["kl/coefficient"] for line in own.train(PROMPTS, reward=lengths)] == [
        line["kl/coefficient"] for line in configured.train(PROMPTS, reward=lengths)
    ]
    assert own.state.kl_coefficient == configured.state.kl_coefficient != 0.1


def test_while_the_critic_warms_up_it_waits() -> None:
    controller = Doubling()
    trainer(controller, critic_warmup_steps=2).train(PROMPTS, reward=lengths)
    assert len(controller.seen) == 1


@pytest.mark.parametrize(
    ("kl", "words"),
    [("none", "needs a KL"), ({"adaptive": {"target": 6.0}}, "remove these"), ({"coefficient": 0.3}, "remove")],
)
def test_two_that_keep_the_coefficient_or_none_to_keep_are_refused(kl: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        trainer(Doubling(), kl=kl)


@pytest.mark.parametrize("bad", [-1.0, math.nan, None])
def test_an_answer_that_is_no_coefficient_is_refused(bad: float) -> None:
    class Broken(Doubling):
        def update(self, kl_values: Sequence[float]) -> float:
            return bad

    with pytest.raises(ConfigError, match=r"kl_controller must be a number of at least 0, got (-1.0|nan|None)"):
        trainer(Broken()).train(PROMPTS, reward=lengths)
