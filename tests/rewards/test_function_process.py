"""A user's function in a process of its own: the same scores, and a hang or a crash costs a batch and not the run."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from proximo.errors import ConfigError, DataError, TrainingError
from proximo.records import ScoreState
from proximo.rewards import function as function_rewards
from proximo.rewards.function import ProcessFunctionReward
from records_made import prompt, response


@contextmanager
def made(function: str, **options: Any) -> Iterator[ProcessFunctionReward]:
    settings = {"name": "f", "timeout_seconds": 300.0, **options}
    source = ProcessFunctionReward(f"example_verifiers:{function}", **settings)
    try:
        yield source
    finally:
        source.close()


def test_the_function_is_called_elsewhere_with_what_it_is_always_called_with() -> None:
    with made("recites", kwargs={"bonus": 0.5}) as source:
        found = source.score([response(text="ab"), response(text="cde")])
        assert source.score([]) == []
    assert [each.score for each in found] == [2.5, 3.5]
    assert [each.components["right"] for each in found] == [1.0, 1.0]
    assert found[0].components["process"] != os.getpid()


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("hangs", "f did not answer within timeout_seconds = 0.3, twice"),
        ("crashes", "f: its worker ended with status 1"),
        ("raises", "f: KeyError: 'answer'"),
    ],
)
def test_a_hang_a_crash_and_an_exception_cost_the_batch_its_scores(
    function: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(function_rewards, "ATTEMPTS", 2)
    with made(function, **({"timeout_seconds": 0.3} if function == "hangs" else {})) as source:
        found = source.score([response(text="ab"), response(text="c")])
        counts = {name.rpartition("/")[2]: value.value for name, value in source.statistics().items()}
    assert [(each.state, each.reason) for each in found] == [(ScoreState.INFRASTRUCTURE_FAULT, reason)] * 2
    assert counts["failure_fraction"] == 1
    assert counts["retries"] == 1


def test_what_the_function_could_not_tell_is_counted_as_a_failure() -> None:
    with made("undecided") as source:
        found = source.score([response(text=text) for text in "abcd"])
        counts = {name.rpartition("/")[2]: value.value for name, value in source.statistics().items()}
    assert [each.valid for each in found] == [True, False, False, True]
    assert [each.state.has_score for each in found] == [True, False, False, True]
    assert (counts["failure_fraction"], counts["timeout_fraction"]) == (0.25, 0)


def test_a_function_that_says_no_scores_stops_the_run() -> None:
    with made("too_few") as source, pytest.raises(TrainingError, match="expected 2, it returned 1"):
        source.score([response(), response()])


def test_mistakes_are_found_before_anything_is_scored() -> None:
    with pytest.raises(ConfigError, match="has nothing callable named 'no_such'"), made("no_such"):
        pass
    unexpected = pytest.raises(ConfigError, match="has no parameter 'bonus', which kwargs sets")
    with unexpected, made("hangs", kwargs={"bonus": 1}):
        pass
    with made("recites") as source, pytest.raises(DataError, match="rows are sent as JSON"):
        source.score([response(to=prompt(metadata={"when": {1}}))])
