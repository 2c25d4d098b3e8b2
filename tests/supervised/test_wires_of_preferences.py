"""Every setting of the reward model's losses reaches its formula, by value, through an update.

The pairs have margins or none, answers of several lengths, and one is the beginning of the other; they are cut into
micro-batches. Scores are of one sequence at a time; what is made of them is written with Python's floats.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest
from statistics import fmean
from typing import Any

import pytest
import torch

from builders import tiny_language_model
from proximo.data.preferences import PreferencePair
from proximo.models.language import LanguageModel
from proximo.models.packing import pack
from proximo.models.scalar import HeadStart, ScalarModel, scalar_from_language_model
from proximo.supervised.reward_recipe import RewardTrainingConfig
from proximo.supervised.reward_trainer import RewardTask, pair_sequences
from supervised.tiny_tasks import pairs as made_pairs
from supervised.tiny_tasks import task_inputs

LOW_RATE = {"learning_rate": 1e-12}


def pairs() -> list[PreferencePair]:
    """The first has no margin; of the second the rejected answer begins with the chosen one."""
    first, second, *rest = made_pairs()
    longer = (*second.chosen_token_ids, 33, 34)
    return [replace(first, margin=None), replace(second, margin=1.5, rejected_token_ids=longer), *rest]


def task(**options: Any) -> RewardTask:
    model = scalar_from_language_model(
        LanguageModel(tiny_language_model(dtype=torch.float64)), HeadStart.NORMAL, seed=1
    )
    with torch.no_grad():
        model.base.get_submodule("score").weight.mul_(20)
    config = RewardTrainingConfig(pairs_per_step=6, tokens_per_microbatch=25, optimizer=LOW_RATE, **options)
    return RewardTask(task_inputs(model, pairs(), pairs(), config))


def scores(model: ScalarModel, pair: PreferencePair) -> list[list[float]]:
    """After each token, of the chosen and of the rejected sequence."""
    with torch.no_grad():
        return [model.token_scores(pack([ids])).tolist() for ids in pair_sequences(pair)]


def surprise(gap: float) -> float:
    return math.log1p(math.exp(-gap))


def of_last(pair: PreferencePair, chosen: list[float], rejected: list[float], centring: float) -> float:
    gap = chosen[-1] - rejected[-1] - (pair.margin or 0.0)
    return surprise(gap) + centring * (chosen[-1] + rejected[-1]) ** 2


def of_window(pair: PreferencePair, chosen: list[float], rejected: list[float]) -> float:
    tokens = zip_longest(*pair_sequences(pair))
    first = next(t for t, (one, other) in enumerate(tokens) if one != other)
    return fmean(
        surprise(chosen[min(t, len(chosen) - 1)] - rejected[min(t, len(rejected) - 1)])
        for t in range(first, max(len(chosen), len(rejected)))
    )


REWARDS: dict[str, tuple[dict[str, Any], Callable[..., float]]] = {
    "plain": ({}, lambda *given: of_last(*given, 0.0)),
    "centred": ({"score_centring": 0.3}, lambda *given: of_last(*given, 0.3)),
    "window": ({"loss": "divergence_window"}, of_window),
}


@pytest.mark.parametrize("name", REWARDS)
def test_the_loss_of_a_reward_model_is_the_formula_of_its_settings(name: str) -> None:
    options, formula = REWARDS[name]
    made = task(**options)
    wanted = fmean(formula(pair, *scores(made.model, pair)) for pair in pairs())
    evaluated = made.evaluate()
    assert evaluated.metrics["evaluation/loss"].value == pytest.approx(wanted, rel=1e-6)
    assert made.step(1).metrics["reward_model/loss"].value == pytest.approx(wanted, rel=1e-6)


def test_dropout_in_reward_training_depends_on_the_step_alone() -> None:
    def weights(drawn_before: int) -> torch.Tensor:
        model = LanguageModel(tiny_language_model(attention_dropout=0.5))
        value = scalar_from_language_model(model, HeadStart.NORMAL, seed=1)
        config = RewardTrainingConfig(pairs_per_step=6, dropout=True, optimizer={"learning_rate": 0.1})
        made = RewardTask(task_inputs(value, pairs(), [], config))
        torch.rand(drawn_before)
        made.step(1)
        return torch.cat([p.detach().flatten() for p in value.model.parameters()])

    assert torch.equal(weights(3), weights(4))
