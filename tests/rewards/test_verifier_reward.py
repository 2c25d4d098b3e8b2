"""A verifier as a reward source: what it is handed, what its grades become, its errors and its metrics."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from proximo.errors import ConfigError, DataError, MissingExtraError, TrainingError
from proximo.metrics.catalogue import catalogue
from proximo.records import Finish, Prompt, ScoreState
from proximo.rewards.source import ClosableSource, ConcurrentSource, EagerSource, MeasuredSource, RewardSource
from proximo.rewards.verifier_reward import VerifierReward
from records_made import prompt, response


@contextmanager
def made(verifier: str, **options: Any) -> Iterator[VerifierReward]:
    source = VerifierReward(f"example_verifiers:{verifier}", **{"name": "j", "answer_seconds": 60.0, **options})
    try:
        yield source
    finally:
        source.close()


def test_the_verifier_sees_all_of_the_answer_and_the_trainer_all_of_the_grade() -> None:
    asked = prompt(text=None, messages=({"role": "user", "content": "2+2?"},), answer="4", metadata={"level": [1]})
    with made("Everything") as source:
        (found,) = source.score([response([7, 8], to=asked, text="fo\udc80ur\n", finish=Finish.LENGTH)])
    assert (found.score, found.state) == (-1.0, ScoreState.MODEL_FAULT)
    told = json.loads(found.reason or "")
    assert told == ["fo\udc80ur\n", [{"role": "user", "content": "2+2?"}], "4", {"level": [1]}, "length", 2]


def test_it_begins_early_and_its_metrics_are_declared_and_need_not_repeat() -> None:
    given = [response(text=text) for text in ("a", "b", "a")]
    with made("Letters", options={"letter": "a"}) as source:
        for kind in (RewardSource, EagerSource, ConcurrentSource, MeasuredSource, ClosableSource):
            assert isinstance(source, kind)
        assert source.statistics() == {}
        source.begin(given[0])
        found = source.score(given)
        metrics = source.statistics()
    assert [each.response for each in found] == given
    assert [(each.score, dict(each.components)) for each in found] == [(s, {"length": 1.0}) for s in (0.5, 0.0, 0.5)]
    values = {name.removeprefix("source/j/"): metric.value for name, metric in metrics.items()}
    assert values["cache_hit_fraction"] == pytest.approx(1 / 3)
    assert values["timeout_fraction"] == values["failure_fraction"] == values["retries"] == 0
    assert {type(value) for value in metrics.values()} == {catalogue().find(name).reduction for name in metrics}
    assert catalogue().repeatable(dict.fromkeys(metrics, 0.0)) == {}


def test_a_component_that_cannot_name_a_metric_stops_the_run() -> None:
    with made("OfNoUse") as source, pytest.raises(TrainingError, match="names a component 'no/name'"):
        source.score([response(text="name")])


@pytest.mark.parametrize(
    ("verifier", "kind", "message"),
    [
        ("needs_an_extra", MissingExtraError, "reward source 'j': install proximo.maths."),
        ("is_misconfigured", ConfigError, "the limit must be above 0"),
        ("breaks", ConfigError, "RuntimeError: no way"),
        ("dies", TrainingError, "ended with status 7 before it was ready"),
        (
            "Unfinished",
            ConfigError,
            r"no method check_row\(reference=..., metadata=...\) and no method close\(\); "
            r"grade\(answer\) cannot be called, since its signature is \(\)",
        ),
        ("Nowhere", ConfigError, "has nothing callable named 'Nowhere'"),
    ],
)
def test_a_verifier_that_cannot_be_made_is_one_error_before_anything_is_graded(
    verifier: str, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message), made(verifier, num_workers=2):
        pass
    with pytest.raises(ConfigError, match="there is no module 'no_such_verifiers'"):
        VerifierReward("no_such_verifiers:X", name="j")


def test_rows_are_checked_by_the_verifier_and_the_message_names_the_row() -> None:
    fit, unfit = prompt("p0"), prompt("p1", metadata={"unfit": True})
    with made("Letters") as source:
        source.check_prompts([fit], {})
        with pytest.raises(DataError, match=r"x.jsonl, row 2: reward source 'j': there is nothing to grade by"):
            source.check_prompts([fit, unfit], {"p1": "x.jsonl, row 2"})
        odd: Prompt = prompt("p2", metadata={"when": {1, 2}})
        with pytest.raises(DataError, match="prompt 'p2': a verifier gets the columns of a row as JSON"):
            source.check_prompts([odd], {})


def test_a_verifier_may_raise_the_errors_of_the_trainer_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_the_trainer.py").write_text(
        "from example_verifiers import Letters\n"
        "from proximo.errors import DataError, MissingExtraError\n"
        "class Picky(Letters):\n"
        "    def __init__(self, letter):\n"
        "        if letter != 'a':\n"
        "            raise MissingExtraError('install a')\n"
        "    def check_row(self, reference, metadata):\n"
        "        raise DataError('no row will do')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingExtraError, match="^reward source 'j': install a$"):
        VerifierReward("of_the_trainer:Picky", name="j", options={"letter": "b"})
    source = VerifierReward("of_the_trainer:Picky", name="j", options={"letter": "a"})
    try:
        with pytest.raises(DataError, match="^prompt 'p0': reward source 'j': no row will do$"):
            source.check_prompts([prompt("p0")], {})
    finally:
        source.close()
