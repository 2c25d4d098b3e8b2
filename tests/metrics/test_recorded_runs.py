"""Alarms on what real runs recorded: healthy ones raise none, sick ones the right one first, at any moment.

recorded_runs.jsonl has of each run of benchmarks/healthy_runs.py what the rules read.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from proximo.metrics.alarms import Rule, find_alarms
from proximo.metrics.console import ProgressInfo
from proximo.metrics.run_files import Run
from proximo.ppo.kind import PPO
from proximo.run.sinks import AlarmWatch
from proximo.trainer_kinds import TrainerKind, trainer_kinds

RECORDS = [json.loads(line) for line in (Path(__file__).parent / "recorded_runs.jsonl").read_text().splitlines()]
HEALTHY = [record for record in RECORDS if record["alarm"] is None]
SICK = [record for record in RECORDS if record["alarm"] is not None]


def run_of(record: dict[str, Any]) -> Run:
    columns = record["metrics"].items()
    lines = tuple(
        {"step": step} | {name: values[place] for name, values in columns if values[place] is not None}
        for place, step in enumerate(record["step"])
    )
    return Run(name=record["name"], lines=lines, config=record["config"], total_steps=record["total_steps"])


def trainer_of(record: dict[str, Any]) -> TrainerKind:
    return next(kind for kind in trainer_kinds() if kind.name == record["trainer"])


def rules_of(record: dict[str, Any]) -> tuple[Rule, ...]:
    return trainer_of(record).metrics.rules


def told(record: dict[str, Any]) -> list[str]:
    """What is printed while the run is under way, with its step."""
    run, said = run_of(record), []
    info = ProgressInfo(trainer=trainer_of(record), total_steps=run.total_steps or 0)
    watch = AlarmWatch(info, record["config"], metrics_file=Path("nowhere"), report=said.append)
    for line in run.lines:
        watch.write(int(line["step"]), {name: value for name, value in line.items() if name != "step"})
    return said


def test_there_are_enough_of_each():
    for trainer in trainer_kinds():
        healthy, sick = (sum(record["trainer"] == trainer.name for record in records) for records in (HEALTHY, SICK))
        assert healthy >= (12 if trainer is PPO else 2)
        assert sick >= (12 if trainer is PPO else 3)


@pytest.mark.parametrize("record", HEALTHY, ids=lambda record: record["name"])
def test_a_healthy_run_raises_no_alarm_at_any_step(record):
    assert find_alarms(run_of(record), rules_of(record)) == ()
    assert told(record) == []


@pytest.mark.parametrize("record", SICK, ids=lambda record: record["name"])
def test_a_sick_run_raises_the_right_alarm_first(record):
    found = find_alarms(run_of(record), rules_of(record))
    assert found[0].title == record["alarm"]
    assert any(record["alarm"] in line for line in told(record))


def test_the_table_of_the_documentation_is_that_of_these_runs():
    page = (Path(__file__).parents[2] / "docs" / "healthy-runs.md").read_text(encoding="utf-8")
    table = page.partition("## All runs")[2]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| *")]
    told_of = {name.strip("`"): alarm.strip("*") for alarm, names in rows for name in names.split(", ")}
    assert told_of == {record["name"]: record["alarm"] for record in SICK}
    assert f" {len(HEALTHY)} healthy runs raise no alarm" in page


def test_a_hundredfold_learning_rate_is_one_alarm_that_names_the_step_and_the_cause():
    record = next(record for record in SICK if record["name"] == "too-large-steps")
    (alarm,) = find_alarms(run_of(record), rules_of(record))
    assert alarm.detail.startswith("Step 1: 55% of tokens were clipped")
    assert "tenth of ppo.policy_optimizer.learning_rate or less, now 0.03" in alarm.advice
    assert alarm.consequences
    assert "raise" not in alarm.text
    assert told(record)[0].startswith("step 3, problem: One step destroyed the policy. Step 1:")
