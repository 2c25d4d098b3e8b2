"""A run that was saved on some ranks goes on on others, where the user allows it: the next step is the same."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from distributed.launched import launched, sft_recipe
from distributed.ranks import Ranks
from proximo.checkpoint import ranks
from proximo.checkpoint.store import CheckpointStore
from proximo.distributed.world import current
from proximo.errors import RunFolderError
from proximo.run.options import RunOptions
from run_outcomes import read_lines
from tiny_runs import changed, make_inputs, recipe_of, run

TOLERANCE = 1e-4


def train(place: Path, folder: Path, num_steps: int, how: str = "start") -> int:
    """Take the PPO run in `folder` to a step, on this rank."""
    changes = {"run.folder": str(folder), "devices.shard": "full", "ppo.num_steps": num_steps}
    options = RunOptions(
        quiet=True,
        resume="never" if how == "start" else "must",
        allow_different_environment=how == "on other ranks",
    )
    return run("ppo", changed(recipe_of("ppo", place), changes), options)


def train_unseen(place: Path, folder: Path) -> None:
    """As where the folder lies on another file system of rank 1's machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "_appears", lambda file, seconds: current().leads)
        with pytest.raises(RunFolderError, match=r"rank 1 of 2 does not see what rank 0 writes"):
            train(place, folder, 1)


def test_a_run_begins_with_a_look_at_its_folder_by_all_ranks(two: Ranks, tmp_path):
    place = make_inputs(tmp_path / "inputs")
    two.run(train_unseen, place, tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def last_line(folder: Path) -> dict[str, Any]:
    line = read_lines(folder / "metrics.jsonl")[-1]
    timed = ("time/", "throughput/", "memory/")
    return {name: value for name, value in line.items() if not name.startswith(timed) and "seconds" not in name}


def assert_same_step(found: Path, wanted: Path) -> None:
    """The last steps of two runs agree, in every metric and in what was sampled."""
    line, other = last_line(found), last_line(wanted)
    assert {name for name in other if name not in line} == set()
    for name, value in other.items():
        assert line[name] == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE), name
    texts = [[each["response"] for each in read_lines(folder / "samples.jsonl")] for folder in (found, wanted)]
    assert texts[0] == texts[1]


def test_ppo_saved_on_two_ranks_and_on_one_goes_on_on_the_other_number(two: Ranks, tmp_path):
    place = make_inputs(tmp_path / "inputs")
    started = tmp_path / "two"
    two.run(train, place, started, 1)
    for role, loader in (("policy", AutoModelForCausalLM), ("value", AutoModelForSequenceClassification)):
        loader.from_pretrained(started / "checkpoints" / "step-000001" / role)  # whole at the end of a run
    assert list((started / "checkpoints" / "step-000001").glob("optimizer/policy/rank-*"))
    alone = tmp_path / "alone"
    train(place, alone, 1)

    with pytest.raises(
        RunFolderError, match=r"(?s)environment \(saved -> now\):.*num_ranks: 2 -> 1.*--allow-different-en"
    ):
        train(place, started, 2, "on the same")
    copies = {size: shutil.copytree(started, tmp_path / f"two-on-{size}") for size in (1, 2)}
    assert train(place, copies[1], 2, "on other ranks") == 0
    assert two.run(train, place, copies[2], 2, "on the same") == [0, 0]
    assert_same_step(copies[1], copies[2])
    log = (copies[1] / "log.txt").read_text(encoding="utf-8")
    assert "resumed in another environment: num_ranks: 2 -> 1" in log
    assert [line["step"] for line in read_lines(copies[1] / "metrics.jsonl")] == [0, 1, 2]

    on_two = shutil.copytree(alone, tmp_path / "alone-on-2")
    assert two.run(train, place, on_two, 2, "on other ranks") == [0, 0]
    assert train(place, alone, 2, "on the same") == 0
    assert_same_step(on_two, alone)
    assert CheckpointStore(on_two / "checkpoints").load().step == 2


@pytest.mark.soak
@pytest.mark.parametrize("fault", [{"rank": 1, "at": "shards"}, {"rank": 0, "at": "save"}])
def test_a_rank_killed_inside_a_save_in_the_background_leaves_the_one_before(fault, tmp_path):
    recipe = sft_recipe(tmp_path, shard="full")
    ended = launched(recipe, {**fault, "number": 2, "do": "kill"})
    assert f"rank {fault['rank']} (process" in ended.errors[0]
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    assert (store.load().step, store.steps()) == (2, (2,))
    assert launched(recipe, {**fault, "number": 99, "do": "kill"}, "--resume").status == 0
    assert store.load().step == 5
    assert [line["step"] for line in read_lines(ended.run / "metrics.jsonl")] == [0, 1, 2, 3, 4, 5]
