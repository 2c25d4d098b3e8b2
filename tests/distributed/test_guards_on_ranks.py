"""A guard ends a run on several ranks: all save together what was trained, and the run goes on from it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launched import launched, write_recipe

from run_outcomes import read_lines
from tiny_runs import changed, make_inputs, recipe_of


def always_one(prompts: Sequence[Any], responses: Sequence[Any], metadata: Sequence[Any]) -> list[float]:
    return [1.0 for _ in responses]


def test_all_ranks_save_before_a_guard_ends_them(tmp_path: Path) -> None:
    """Before the updates of a step, so that the state of the step before is saved."""
    place = make_inputs(tmp_path)
    settings = {"devices.shard": "full", "run.save_every_steps": 100, "ppo.num_steps": 4, "value.init_from": "policy"}
    settings["reward"] = [{"kind": "function", "function": "distributed.test_guards_on_ranks:always_one"}]
    recipe = changed(recipe_of("ppo", place), settings)
    guarded = changed(recipe, {"ppo.guards.max_constant_reward_steps": 3})
    ended = launched(write_recipe("ppo", guarded, place), {})
    assert ended.status == 1
    assert len(ended.errors) == 1, ended.output
    assert "saved after step 2\n" in ended.output
    assert (ended.run / "checkpoints" / "latest").read_text() == "step-000002\n"
    assert ended.outcome["state"] == "failed"
    again = launched(write_recipe("ppo", recipe, place), {}, "--resume")
    assert again.status == 0, again.output
    assert [line["step"] for line in read_lines(again.run / "metrics.jsonl")] == [0, 1, 2, 3, 4]
