"""What functions and reward models say of themselves: how long a batch took, and what had no score."""

import math
import time

import pytest
import torch

from builders import tiny_language_model
from proximo.errors import TrainingError
from proximo.metrics.values import Mean, MetricValue, Quantile
from proximo.models.language import LanguageModel
from proximo.models.scalar import HeadStart, scalar_from_language_model
from proximo.rewards.function import FunctionReward
from proximo.rewards.model import ModelReward
from proximo.rewards.source import statistics_of
from proximo.rewards.weighted import WeightedReward
from records_made import response

SECONDS = ("seconds_p50", "seconds_p95", "seconds_p99")


def seconds(found: dict[str, MetricValue], name: str) -> tuple[float, ...]:
    value = found[f"source/{name}/seconds_p50"]
    assert isinstance(value, Quantile)
    assert {found[f"source/{name}/{key}"].values for key in SECONDS} == {value.values}  # ty: ignore
    return value.values


def test_a_function_says_how_long_each_batch_took_and_how_many_responses_had_no_score() -> None:
    def mostly(prompts: list, responses: list, metadata: list) -> list:
        time.sleep(0.02)
        return [{"unknown": math.nan, "foreign": None}.get(text, 1.0) for text in responses]

    source = FunctionReward(mostly, name="mine")
    source.score([response(text="a"), response(text="unknown"), response(text="b")])
    source.score([response(text="foreign")])
    source.score([])
    found = statistics_of(source)
    assert set(found) == {f"source/mine/{key}" for key in ("failure_fraction", *SECONDS)}
    assert found["source/mine/failure_fraction"] == Mean(1, 4)
    assert len(seconds(found, "mine")) == 2
    assert min(seconds(found, "mine")) >= 0.02
    assert statistics_of(source) == {}


def test_a_function_that_raises_has_scored_nothing() -> None:
    source = FunctionReward(lambda responses: [1 / 0])
    with pytest.raises(TrainingError):
        source.score([response()])
    assert statistics_of(source) == {}


def test_a_reward_model_says_the_same_and_a_sum_passes_it_on() -> None:
    model = scalar_from_language_model(LanguageModel(tiny_language_model()), HeadStart.NORMAL)
    reward = WeightedReward(
        [(1.0, ModelReward(model, name="verifier")), (1.0, FunctionReward(lambda responses: [1.0, 2.0]))]
    )
    reward.score([response(), response()])
    found = reward.statistics()
    assert found["source/verifier/failure_fraction"] == found["source/function/failure_fraction"] == Mean(0, 2)
    assert all(each > 0 for each in (*seconds(found, "verifier"), *seconds(found, "function")))

    with torch.no_grad():
        model.base.get_submodule("score").weight.fill_(math.nan)
    reward.score([response(), response()])
    assert reward.statistics()["source/verifier/failure_fraction"] == Mean(2, 2)
