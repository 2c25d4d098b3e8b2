"""Alarms while a run is under way: each once, when it first comes, and none that the process before has said."""

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from made_up_runs import write_lines

from proximo.metrics.alarms import find_alarms
from proximo.metrics.console import ProgressInfo
from proximo.ppo.kind import PPO
from proximo.run import sinks
from proximo.run.sinks import AlarmWatch


def watch(said: list[str], *, total_steps: int = 40, metrics_file: Path = Path("nowhere")) -> AlarmWatch:
    info = ProgressInfo(trainer=PPO, total_steps=total_steps)
    return AlarmWatch(info, {}, metrics_file=metrics_file, report=said.append)


def steps(numbers: Iterable[int]) -> list[dict[str, float]]:
    """Every score is 0, and at step 7 a response is lost."""
    return [{"step": n, "score/mean": 0.0, "score/std": 0.0, "response/unscored": float(n == 7)} for n in numbers]


def feed(taken: AlarmWatch, lines: list[dict[str, float]]) -> None:
    for line in lines:
        taken.write(int(line["step"]), {name: value for name, value in line.items() if name != "step"})


def test_an_alarm_is_said_at_the_step_that_raises_it_and_never_again():
    said: list[str] = []
    feed(watch(said), steps(range(1, 41)))
    assert [line[: line.index(".")] for line in said] == [
        "step 5, problem: Every score is the same number",
        "step 7, warning: Responses were unscored",
    ]


def test_a_trend_is_not_judged_before_half_of_the_run_and_not_by_what_another_alarm_explains():
    said: list[str] = []
    lines = [{"step": n, "score/mean": 0.5, "score/std": 0.3} for n in range(1, 41)]
    feed(watch(said), lines)
    assert [line[: line.index(".")] for line in said] == ["step 20, warning: The score does not rise"]


def test_a_resumed_run_does_not_repeat_what_the_process_before_has_said(tmp_path: Path):
    said: list[str] = []
    write_lines(tmp_path / "metrics.jsonl", [*steps(range(1, 6)), {"step": 6, "score/mean": None, "of/later": 1.0}])
    feed(watch(said, metrics_file=tmp_path / "metrics.jsonl"), steps(range(7, 41)))
    assert [line[: line.index(".")] for line in said] == ["step 7, warning: Responses were unscored"]


def test_what_no_run_repeats_raises_no_alarm():
    taken = watch([])
    taken.write(1, {"time/step_seconds": 3.0, "score/mean": 1.0})
    assert taken._lines == [{"step": 1, "score/mean": 1.0}]


def test_a_long_run_is_judged_at_a_fiftieth_more_of_its_length_and_at_its_end(monkeypatch):
    judged: list[int] = []
    monkeypatch.setattr(
        sinks, "find_alarms", lambda run, rules: judged.append(len(run.lines)) or find_alarms(run, rules)
    )
    said: list[str] = []
    lines = steps(range(8, 1001))
    feed(watch(said, total_steps=1000), lines)
    gaps = [later - earlier for earlier, later in pairwise(judged)]
    assert judged[-1] == len(lines)
    assert max(gaps) == 19
    assert gaps[:40] == [1] * 40
    assert len(judged) < 300
