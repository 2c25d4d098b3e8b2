"""The problems that the recipes make on the spot: right answers are right, and what is held out stays out."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest

from proximo.config.rewards.verifiers import CountdownRewardConfig
from proximo.errors import ConfigError
from proximo.recipes import countdown, programs
from proximo_verifiers.maths.countdown import CountdownVerifier
from proximo_verifiers.verifier import Answer, Grade

COUNTDOWN = CountdownRewardConfig(kind="countdown", answer_from=("response",)).verifier_options()
MAKERS: tuple[Callable[..., Iterator[dict[str, Any]]], ...] = (countdown.rows, programs.rows)


def grades(rows: Iterator[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], Grade]]:
    verifier = CountdownVerifier(**COUNTDOWN)
    for row in rows:
        yield row, verifier.grade(Answer(text=row["response"], prompt=row["prompt"], metadata=row))


def passes(row: dict[str, Any]) -> bool:
    """Runs a program that was made here, no model's, with its tests."""
    names: dict[str, Any] = {}
    try:
        exec(row["response"], names)
        for test in row["test_list"]:
            exec(test, names)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("signs", ["+-", "+-*"])
def test_every_countdown_solution_uses_its_numbers_once_and_makes_the_target(signs: str) -> None:
    for row, grade in grades(countdown.rows(500, 3, signs=signs)):
        assert grade.score == 1.0, (row, grade)
        assert row["prompt"] == f"{' '.join(map(str, row['nums']))} = {row['target']}\n"
        assert 1 <= row["target"] <= countdown.LARGEST_TARGET
        assert set(row["response"]) <= {*"0123456789()", *signs}


def test_careless_countdown_answers_use_the_numbers_and_mostly_make_something_else() -> None:
    found = [grade for _, grade in grades(countdown.rows(300, 3, careless=1.0))]
    assert all(grade.components["numbers_correct"] == 1.0 for grade in found)
    assert 0.05 < sum(grade.score for grade in found) / len(found) < 0.4


def test_every_program_passes_its_tests_and_careless_ones_mostly_do_not() -> None:
    assert all(map(passes, programs.rows(400, 3)))
    careless = list(programs.rows(400, 3, careless=1.0))
    share = sum(map(passes, careless)) / len(careless)
    assert 0.1 < share < 0.4
    assert [row["test_list"] for row in careless] != [row["test_list"] for row in programs.rows(400, 4)]
    half = sum(map(passes, programs.rows(400, 3, careless=0.5))) / 400
    assert share < half < 1


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__module__)
def test_rows_depend_on_seed_and_place_alone_and_held_out_problems_are_in_no_training_row(make: Any) -> None:
    rows = list(make(2000, 5))
    assert list(islice(make(10, 5), 10)) == rows[:10]
    assert list(make(10, 6)) != rows[:10]
    held_out = {row["prompt"] for row in make(300, 7, split="held_out")}
    assert not held_out & {row["prompt"] for row in rows}
    assert len(held_out) > 180


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (countdown.rows, {"split": "test"}, "split of the countdown problems"),
        (countdown.rows, {"counts": [4]}, "counts must be 2, 3 or both"),
        (countdown.rows, {"largest": 1}, "largest at least 2"),
        (countdown.rows, {"signs": "+/"}, "signs some of"),
        (countdown.rows, {"careless": -0.1}, "careless a share"),
        (programs.rows, {"split": "test"}, "split of the programs"),
        (programs.rows, {"careless": 1.5}, "careless is a share"),
    ],
)
def test_options_that_make_no_problem_are_refused(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        list(make(1, 0, **options))
