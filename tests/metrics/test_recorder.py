"""From values to the line of a step."""

import json
import math

import pytest

from proximo.metrics.catalogue import step_line
from proximo.metrics.definitions import UnknownMetricError
from proximo.metrics.values import Last, Max, Mean, Sum


def test_values_of_one_name_combine_by_their_own_rule():
    first = {"policy/loss": Mean(6.0, 2), "response/tokens_max": Max(7), "time/rollout_seconds": Sum(1.5)}
    second = {"policy/loss": Mean(0.0, 4), "response/tokens_max": Max(5), "time/rollout_seconds": Sum(0.5)}
    line, _ = step_line(first, second, {"gold/mean": Mean(0.0, 0)})  # the last one saw nothing
    assert line == {"response/tokens_max": 7, "policy/loss": 1.0, "time/rollout_seconds": 2.0}
    assert '"response/tokens_max": 7,' in json.dumps(line), "whole numbers stay whole"


def test_a_line_has_the_order_of_the_catalogue_whatever_came_first():
    values = {name: Mean(1.0, 1) for name in ("score/zeal/mean", "score/awe/mean", "score/mean")}
    line, _ = step_line({"progress/step": Last(1)} | values)
    assert list(line) == ["score/mean", "score/awe/mean", "score/zeal/mean", "progress/step"]


def test_an_undeclared_name_or_another_reduction_is_an_error():
    with pytest.raises(UnknownMetricError, match="score/meen"):
        step_line({"score/meen": Mean(1.0, 1)})
    with pytest.raises(TypeError, match="declared as a Mean, and was recorded as a Last"):
        step_line({"score/mean": Last(1.0)})


def test_what_is_not_finite_is_left_out_counted_and_named():
    line, non_finite = step_line(
        {"policy/loss": Mean(math.nan, 3), "value/loss": Mean(math.inf, 3), "score/mean": Mean(3.0, 3)}
    )
    assert line == {"score/mean": 1.0, "progress/non_finite_metrics": 2}
    assert non_finite == ["policy/loss", "value/loss"]
    json.dumps(line, allow_nan=False)
