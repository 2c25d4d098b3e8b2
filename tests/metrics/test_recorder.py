"""From values to the line of a step."""

import json
import math

import pytest

from proximo.metrics.catalogue import Recorder
from proximo.metrics.definitions import UnknownMetricError
from proximo.metrics.values import Last, Max, Mean, Sum


def test_values_of_one_name_combine_by_their_own_rule():
    recorder = Recorder()
    recorder.record("policy/loss", Mean(6.0, 2))
    recorder.record("policy/loss", Mean(0.0, 4))
    recorder.record_all({"response/tokens_max": Max(7), "time/rollout_seconds": Sum(1.5)})
    recorder.record_all({"response/tokens_max": Max(5), "time/rollout_seconds": Sum(0.5)})
    recorder.record("gold/mean", Mean(0.0, 0))  # it saw nothing
    line = recorder.line()
    assert line == {"response/tokens_max": 7, "policy/loss": 1.0, "time/rollout_seconds": 2.0}
    assert '"response/tokens_max": 7,' in json.dumps(line), "whole numbers stay whole"
    assert recorder.line() == {}


def test_a_line_has_the_order_of_the_catalogue_whatever_came_first():
    recorder = Recorder()
    for name in ("progress/step", "score/zeal/mean", "score/awe/mean", "score/mean"):
        recorder.record(name, Last(1) if name == "progress/step" else Mean(1.0, 1))
    assert list(recorder.line()) == ["score/mean", "score/awe/mean", "score/zeal/mean", "progress/step"]


def test_an_undeclared_name_or_another_reduction_is_an_error():
    with pytest.raises(UnknownMetricError, match="score/meen"):
        Recorder().record("score/meen", Mean(1.0, 1))
    with pytest.raises(TypeError, match="declared as a Mean, and was recorded as a Last"):
        Recorder().record("score/mean", Last(1.0))


def test_what_is_not_finite_is_left_out_counted_and_named():
    recorder = Recorder()
    recorder.record("policy/loss", Mean(math.nan, 3))
    recorder.record("value/loss", Mean(math.inf, 3))
    recorder.record("score/mean", Mean(3.0, 3))
    line = recorder.line()
    assert line == {"score/mean": 1.0, "progress/non_finite_metrics": 2}
    assert recorder.non_finite == ("policy/loss", "value/loss")
    json.dumps(line, allow_nan=False)
    recorder.line()
    assert recorder.non_finite == ()
