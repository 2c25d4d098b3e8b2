"""A guard ends a run on several ranks: all save together what was trained, and the run goes on from it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distributed.ranks import Ranks
from proximo.errors import ProximoError
from proximo.run.options import RunOptions
from run_outcomes import read_lines
from tiny_runs import changed, make_inputs, recipe_of, run


def always_one(prompts: Sequence[Any], responses: Sequence[Any], metadata: Sequence[Any]) -> list[float]:
    return [1.0 for _ in responses]


def ended_by(recipe: dict[str, Any]) -> str:
    try:
        run("ppo", recipe, RunOptions(quiet=True))
    except ProximoError as error:
        return str(error)
    return "nothing"


def test_all_ranks_save_before_a_guard_ends_them(two: Ranks, tmp_path: Path) -> None:
    """Before the updates of a step, so that the state of the step before is saved."""
    place = make_inputs(tmp_path)
    settings = {"devices.shard": "full", "run.save_every_steps": 100, "ppo.num_steps": 3, "value.init_from": "policy"}
    settings["reward"] = [{"kind": "function", "function": "distributed.test_guards_on_ranks:always_one"}]
    recipe = changed(recipe_of("ppo", place), settings)
    ends = two.run(ended_by, changed(recipe, {"ppo.guards.max_constant_reward_steps": 2}))
    assert all("step 2: all scores of 2 steps in a row are 1" in each for each in ends)
    assert "saved after step 1\n" in (place / "run" / "log.txt").read_text()
    assert (place / "run" / "checkpoints" / "latest").read_text() == "step-000001\n"
    assert json.loads((place / "run" / "outcome.json").read_text())["state"] == "failed"
    assert two.run(run, "ppo", recipe, RunOptions(quiet=True, resume="must")) == [0, 0]
    assert [line["step"] for line in read_lines(place / "run" / "metrics.jsonl")] == [0, 1, 2, 3]
