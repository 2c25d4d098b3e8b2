"""A run that takes no update says so, with the cause: while it runs, at its end, in its outcome and its report."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from proximo.metrics.shared_declarations import NO_UPDATE
from proximo.run.options import RunOptions
from tiny_runs import Kind, changed, make_inputs, recipe_of, run

LOUD = RunOptions()


def never_solved(prompts: Sequence[str], responses: Sequence[str], metadata: Sequence[Any]) -> list[dict[str, float]]:
    """A score that differs between responses, and a task reward that does not."""
    return [{"score": len(text) / 10, "solved": 0.0} for text in responses]


def outcome(place: Path) -> dict[str, Any]:
    return json.loads((place / "run" / "outcome.json").read_text())


GROUPED: Mapping[str, Any] = {
    "value": {},
    "ppo.advantage": {"kind": "group_centred", "zero_variance_groups": "exclude"},
    "ppo.responses_per_prompt": 2,
    "ppo.num_steps": 3,
    "ppo.kl": "none",
}


def test_groups_that_are_all_excluded_by_their_task_reward_are_told_as_the_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = make_inputs(tmp_path)
    source = {"kind": "function", "name": "own", "function": "test_runs_without_update:never_solved"}
    recipe = changed(recipe_of("ppo", place), {**GROUPED, "reward": [source], "ppo.task_reward": "own.solved"})
    assert run("ppo", recipe, LOUD) == 0
    said = capsys.readouterr().err
    cause = "all groups were excluded, because in each of them own.solved (ppo.task_reward) is the same number"
    assert f"finished: 3 steps, but no update was taken: 0 updates in all, none in steps 1 to 3: {cause}" in said
    assert f"step 3, problem: {NO_UPDATE}." in said
    ended = outcome(place)
    assert ended["state"] == "finished"
    assert cause in ended["reason"]
    assert "after step 3 of 3, but no update was taken" in (place / "run" / "report.html").read_text()


def test_a_run_that_takes_updates_finishes_without_a_reason(tmp_path: Path) -> None:
    place = make_inputs(tmp_path)
    assert run("ppo", changed(recipe_of("ppo", place), {**GROUPED, "reward.0.name": "judge"}), LOUD) == 0
    assert outcome(place) == {"state": "finished", "total_steps": 3, "reason": None}


@pytest.mark.parametrize("kind", ["sft", "reward"])
def test_updates_that_are_all_skipped_are_told_by_supervised_trainers(
    kind: Kind, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = make_inputs(tmp_path)
    destroying = {"learning_rate": 1e30, "schedule": "constant", "warmup_updates": 0}
    recipe = changed(recipe_of(kind, place), {f"{kind}.optimizer": destroying})
    assert run(kind, recipe, LOUD) == 0
    assert "every update was skipped" in outcome(place)["reason"]
    assert "but no update was taken: 1 update in all, none in steps 2 to 5: every" in capsys.readouterr().err
