"""The catalogue is the only place that knows metric names, and everything else agrees with it."""

import re

import pytest

from docs.metrics_page import PAGE, REDUCTIONS, metrics_page
from proximo.metrics.catalogue import catalogue, trainer_by_metrics
from proximo.metrics.definitions import Catalogue, Metric, UnknownMetricError
from proximo.metrics.report.views import definition_of
from proximo.metrics.run_files import Run, Series
from proximo.ppo.kind import PPO
from proximo.supervised.kinds import DPO, KTO, REWARD, SFT
from proximo.trainer_kinds import trainer_kinds


def test_every_metric_is_declared_once_with_a_unit_and_a_definition_that_is_a_sentence():
    names = [metric.name for metric in catalogue().metrics]
    assert len(names) == len(set(names))
    for metric in catalogue().metrics:
        assert sum(each.matches(metric.name) for each in catalogue().metrics if not each.is_pattern) <= 1
        assert metric.unit, metric.name
        assert definition_of(metric).endswith("."), f"{metric.name} has no definition in docs/metrics.md"


def test_a_name_is_looked_up_once_however_often_it_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    place = catalogue().position("score/mean")
    asked: list[str] = []
    matches = Metric.matches
    monkeypatch.setattr(Metric, "matches", lambda metric, name: asked.append(name) or matches(metric, name))
    fresh = Catalogue(catalogue().metrics)
    for _ in range(3):
        assert fresh.find("score/mean").name == "score/mean"
        assert fresh.get("nothing/of/this") is None
        assert fresh.position("score/mean") == place
    assert asked.count("nothing/of/this") == len(catalogue().metrics)
    assert asked.count("score/mean") == place[0] + 1


def test_a_component_may_have_any_name_of_one_segment_and_what_does_not_fit_is_unknown():
    assert catalogue().find("score/is-warm_2.0/mean").name == "score/<component>/mean"
    assert catalogue().find("evaluation/score/form").name == "evaluation/score/<component>"
    for name in ("score/a/b/mean", "score//mean", "score/a b/mean", "score/a/mean/x", "xscore/a/mean"):
        with pytest.raises(UnknownMetricError):
            catalogue().find(name)
    with pytest.raises(UnknownMetricError, match="nearest is 'kl/sequence'"):
        catalogue().find("kl/sequnce")


def test_times_and_memory_are_left_out_of_what_a_second_run_must_repeat():
    line = {
        "step": 3,
        "score/mean": 1.0,
        "time/step_seconds": 9.1,
        "memory/peak_mib": 5,
        "throughput/train_tokens_per_second": 2,
    }
    assert catalogue().repeatable(line) == {"step": 3, "score/mean": 1.0}


def test_every_name_that_a_trainer_shows_is_declared_and_every_curve_and_rule_has_its_texts():
    declared = {metric.name for metric in catalogue().metrics}
    for metrics in (trainer.metrics for trainer in trainer_kinds()):
        assert metrics.watched
        assert all(
            map(catalogue().find, [*metrics.watched, *(n for each in metrics.before_after.values() for n in each)])
        )
        assert len({curve.key for curve in metrics.curves}) == len(metrics.curves)
        for curve in metrics.curves:
            assert {trace.name for trace in curve.traces} <= declared, curve.title
            assert curve.healthy, curve.title
        assert all(rule.when and rule.advice for rule in metrics.rules)


def test_every_rule_asks_for_declared_metrics_only():
    asked = []

    class Listening(Run):
        def series(self, name: str) -> Series:
            catalogue().find(name)
            asked.append(name)
            return Series(tuple(range(20)), (0.5,) * 20)

    for rules in (trainer.metrics.rules for trainer in trainer_kinds()):
        for rule in rules:
            rule.check(Listening(name="run"))
            for mentioned in re.findall(r"[a-z_]+/[a-z_0-9]+", rule.when):
                catalogue().find(mentioned)
    assert len(set(asked)) > 12


def test_the_trainer_is_told_from_the_metrics():
    assert trainer_by_metrics(["sft/loss"]) is SFT
    assert trainer_by_metrics(["evaluation/loss"]) is SFT
    assert trainer_by_metrics(["evaluation/loss", "evaluation/pair_accuracy"]) is REWARD
    assert trainer_by_metrics(["dpo/loss", "evaluation/pair_accuracy"]) is DPO
    assert trainer_by_metrics(["evaluation/pair_accuracy", "evaluation/logprob_chosen"]) is DPO
    assert trainer_by_metrics(["evaluation/loss", "evaluation/auc"]) is KTO
    assert trainer_by_metrics(["evaluation/score", "evaluation/kl"]) is PPO
    assert trainer_by_metrics(iter(["evaluation/score"])) is PPO
    assert trainer_by_metrics(["progress/step"]) is None


def test_the_documentation_is_what_the_declarations_say():
    assert PAGE.read_text(encoding="utf-8") == metrics_page(), (
        "docs/metrics.md is out of date: PYTHONPATH=tests python -m docs.metrics_page"
    )


def test_the_documentation_has_every_metric_every_alarm_and_every_reduction():
    page = metrics_page()
    assert all(f"| `{metric.name}`" in page for metric in catalogue().metrics)
    assert all(rule.title in page for trainer in trainer_kinds() for rule in trainer.metrics.rules)
    assert {metric.reduction for metric in catalogue().metrics} <= set(REDUCTIONS)
    assert all(f"### {trainer.title}\n" in page for trainer in trainer_kinds())
    rows = [row for row in page.splitlines() if row.startswith("| `")]
    assert all(len(re.findall(r"(?<!\\)\|", row)) in (3, 6) for row in rows), "a row is torn by a bar"
