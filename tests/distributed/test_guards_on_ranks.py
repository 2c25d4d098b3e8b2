"""A guard ends a run on several ranks: all save together what was trained, and the run goes on from it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from launched import launched, write_recipe

from run_outcomes import read_lines
from tiny_runs import changed, make_inputs, recipe_of


def always_one(prompts: Sequence[Any], responses: Sequence[Any], metadata: Sequence[Any]) -> list[float]:
    return [1.0 for _ in responses]


def skipping(limit: float) -> dict[str, Any]:
    steep = {"learning_rate": 0.1, "warmup_updates": 0, "schedule": "constant"}
    guards = {"max_kl": 1e-9, "max_skipped_fraction": limit}
    return {"ppo.policy_optimizer": steep, "ppo.guards": guards}


@pytest.mark.parametrize(
    ("guard", "without", "saved"),
    [
        ({"ppo.guards.max_constant_reward_steps": 3}, {}, 2),
        (skipping(0.01), skipping(1.0), 1),
    ],
    ids=["before the updates", "after the step"],
)
def test_all_ranks_save_before_a_guard_ends_them(
    guard: dict[str, Any], without: dict[str, Any], saved: int, tmp_path: Path
) -> None:
    place = make_inputs(tmp_path)
    settings = {"devices.shard": "full", "run.save_every_steps": 100, "ppo.num_steps": 4, "value.init_from": "policy"}
    if "ppo.guards.max_constant_reward_steps" in guard:
        settings["reward"] = [{"kind": "function", "function": "distributed.test_guards_on_ranks:always_one"}]
    recipe = changed(recipe_of("ppo", place), settings)
    ended = launched(write_recipe("ppo", changed(recipe, guard), place), {})
    assert ended.status == 1
    assert len(ended.errors) == 1, ended.output
    assert f"saved after step {saved}\n" in ended.output
    assert (ended.run / "checkpoints" / "latest").read_text() == f"step-{saved:06d}\n"
    assert ended.outcome["state"] == "failed"
    again = launched(write_recipe("ppo", changed(recipe, without), place), {}, "--resume")
    assert again.status == 0, again.output
    assert [line["step"] for line in read_lines(again.run / "metrics.jsonl")] == [0, 1, 2, 3, 4]
