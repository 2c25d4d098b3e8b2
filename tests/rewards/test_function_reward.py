"""A user's function scores; what it cannot tell is a fault and never a number; one that hangs ends the run."""

import math
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from proximo.errors import ConfigError, TrainingError
from proximo.records import Response, Scored, ScoreState
from proximo.rewards.function import FunctionReward
from proximo.rewards.function_binding import import_function
from proximo.rewards.weighted import WeightedReward
from records_made import response
from waiting import LATEST_SECONDS


def test_a_mapping_gives_the_score_and_named_components() -> None:
    source = FunctionReward(lambda prompts, responses, metadata: [{"score": 3, "fluent": 1, "short": 2.0}])
    (result,) = source.score([response()])
    assert (result.score, dict(result.components)) == (3.0, {"fluent": 1.0, "short": 2.0})


@pytest.mark.parametrize("grade", [math.nan, math.inf, {"score": None}, {"score": 1.0, "part": math.nan}])
def test_what_is_no_number_is_a_fault_and_not_a_score(grade) -> None:
    (result,) = FunctionReward(lambda prompts, responses, metadata: [grade]).score([response()])
    assert result.state is ScoreState.INFRASTRUCTURE_FAULT
    assert math.isnan(result.score)
    assert not result.valid


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda prompts, responses, metadata: [1.0, 2.0], "expected 1, it returned 2"),
        (lambda prompts, responses, metadata: 1.0, "returned float"),
        (lambda prompts, responses, metadata: [{"reward": 1.0}], "either 'score' or 'token_rewards'"),
        (lambda prompts, responses, metadata: "1", "expected 1, it returned str"),
        (lambda prompts, responses, metadata: b"1", "returned bytes"),
        (lambda prompts, responses, metadata: {"a": 1.0}, "returned dict"),
        (lambda prompts, responses, metadata: {1.0}, "returned set"),
        (lambda prompts, responses, metadata: ["1"], "must return a number.*returned .1."),
        (lambda prompts, responses, metadata: [{"score": 1.0, "part": "2"}], "must return a number"),
        (lambda prompts, responses, metadata: [{"token_rewards": b"11"}], "one number for each"),
        (
            lambda prompts, responses, metadata: [{"token_rewards": ["1"] * len(metadata[0]["token_ids"])}],
            "one number for each",
        ),
        (lambda prompts, responses, metadata: ["good"], "must return a number.*returned .good."),
        (lambda prompts, responses, metadata: 1 / 0, "raised ZeroDivisionError"),
        (lambda prompts, responses, metadata: [{"score": 1.0, "is ok": 1}], "component 'is ok'.*letters, digits"),
    ],
)
def test_a_function_that_breaks_its_contract_stops_the_run(function, message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        FunctionReward(function).score([response()])


def test_arrays_and_tensors_are_sequences_too() -> None:
    batch = [response(), response()]
    for made in (np.array([1.0, 2.5]), torch.tensor([1.0, 2.5])):
        found = FunctionReward(lambda prompts, responses, metadata, made=made: made).score(batch)
        assert [each.score for each in found] == [1.0, 2.5]


def test_an_error_of_the_function_is_named_with_its_place() -> None:
    line = fails.__code__.co_firstlineno + 1
    with pytest.raises(TrainingError, match=rf"raised KeyError: 'x' \(.*test_function_reward.py, line {line}\)"):
        FunctionReward(fails).score([response()])


def test_a_function_that_expects_messages_is_told_how_to_get_them() -> None:
    source = FunctionReward(lambda completions: [float(len(each[0]["content"])) for each in completions])
    with pytest.raises(TrainingError, match=r"string indices must be.*so are the completions; data.as_messages=true"):
        source.score([response()])


def fails(prompts, responses, metadata):
    return {}["x"]


def test_a_function_that_hangs_stops_the_run_and_says_what_was_waited_for() -> None:
    go_on = threading.Event()
    source = FunctionReward(lambda responses: [float(go_on.wait(LATEST_SECONDS))], name="slow", timeout_seconds=0.05)
    with pytest.raises(TrainingError, match="'slow' did not answer for 1 response within timeout_seconds = 0.05"):
        source.score([response()])
    go_on.set()


def test_no_responses_call_nothing() -> None:
    assert FunctionReward(lambda prompts, responses, metadata: 1 / 0).score([]) == []


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("math.sqrt", "package.module:function"),
        ("no_such_module_here:f", "cannot be imported"),
        ("math:no_such", "has no function 'no_such'"),
        ("math:pi", "has no function 'pi'"),
    ],
)
def test_a_wrong_import_path_is_a_config_error(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        import_function(path)


def test_a_module_that_fails_on_import_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fails_on_import.py").write_text("x = undefined_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="NameError: name 'undefined_name' is not defined"):
        import_function("fails_on_import:f")


def test_an_import_path_names_a_function() -> None:
    assert import_function("math:sqrt") is math.sqrt


class Constant:
    """A source that gives every response the same grade."""

    def __init__(self, name: str, score: float, state: ScoreState = ScoreState.SCORED) -> None:
        self.name, self._score, self._state = name, score, state

    def score(self, responses: list[Response]) -> list[Scored]:
        return [
            Scored(response=r, score=self._score, components={"x": 1.0}, state=self._state, reason=self.name)
            for r in responses
        ]


def test_sources_add_up_by_weight_and_keep_their_own_scores_as_components() -> None:
    (result,) = WeightedReward([(2.0, Constant("a", 3.0)), (-1.0, Constant("b", 1.0))]).score([response()])
    assert result.score == 5.0
    assert dict(result.components) == {"a": 3.0, "a.x": 1.0, "b": 1.0, "b.x": 1.0}


@pytest.mark.parametrize(("state", "valid"), [(ScoreState.MODEL_FAULT, True), (ScoreState.INFRASTRUCTURE_FAULT, False)])
def test_the_worst_state_of_the_sources_is_that_of_the_sum(state: ScoreState, valid: bool) -> None:
    (result,) = WeightedReward([(1.0, Constant("a", 3.0)), (1.0, Constant("b", 1.0, state))]).score([response()])
    assert result.state is state
    assert result.valid is valid
    assert math.isnan(result.score) is not valid
