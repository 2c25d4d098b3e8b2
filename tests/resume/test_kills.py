"""Real processes, really killed: the run that goes on ends with the bits of one that was never interrupted."""

import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gated_reward import GATE
from lives import Driver, environment, write_recipe

from proximo.kernels import kernels_of
from proximo.run.options import RunOptions
from run_outcomes import assert_same_outcome, assert_steps_once_in_tensorboard, outcome, read_lines
from tiny_runs import IN_AN_ENVIRONMENT, LORA, NUM_STEPS, Kind, changed, make_inputs, recipe_of, run
from waiting import LATEST_SECONDS, wait_until

CHANGES: dict[Kind, dict[str, Any]] = {
    "sft": {"tokenizer": {"train_vocab_size": 280}},
    "reward": {"run.keep_last": 3},
    "ppo": {"model.lora": LORA},
}
"""Processes differ in the order of their sets and hash tables: a tokenizer that is trained anew must not."""


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    with Driver() as started:
        yield started


@pytest.mark.usefixtures("no_report_no_fsync")
@pytest.mark.parametrize("kind", CHANGES)
def test_a_run_of_killed_processes_ends_with_the_same_bits(kind: Kind, tmp_path: Path, driver: Driver) -> None:
    """One dies in training, one within a save, one between the log and the save."""
    place = make_inputs(tmp_path)
    recipe = changed(recipe_of(kind, place), {"run.tensorboard": True, **CHANGES[kind]})
    run(kind, recipe, RunOptions(quiet=True))
    expected = outcome(place / "run")
    (place / "run").rename(place / "uninterrupted")
    draw = random.Random(f"kills of {kind}")
    kills = [
        {"at": "call", "step": draw.randint(2, 4), "number": draw.randrange(5000)},
        {"at": "effect", "save": 1, "effect": draw.randrange(25), "moment": draw.choice(["before", "torn", "after"])},
        {"at": "line", "line": 1, "moment": "after"},
    ]
    lives = [driver.live(kind, recipe, kill) for kill in kills]
    driver.live(kind, recipe)
    assert_same_outcome(place / "run", expected, after=", ".join(life.where for life in lives))
    assert_steps_once_in_tensorboard(place / "run" / "tensorboard", NUM_STEPS)


@pytest.mark.usefixtures("no_report_no_fsync")
def test_a_run_killed_with_environments_in_flight_ends_with_the_same_bits(tmp_path: Path, driver: Driver) -> None:
    """In the rollout of the first step, and in that of a later one, after a checkpoint.

    Without kernels the last bits of a log-prob depend on which calls are decoded together, so on the clock.
    """
    if missing := kernels_of("cpu").why_missing():
        pytest.skip(missing)
    place = make_inputs(tmp_path)
    recipe = changed(recipe_of("ppo", place), IN_AN_ENVIRONMENT)
    run("ppo", recipe, RunOptions(quiet=True))
    expected = outcome(place / "run")
    (place / "run").rename(place / "uninterrupted")
    lives = [driver.live("ppo", recipe, {"at": "turn", "turn": turn}) for turn in (12, 45)]
    assert all("environments in flight" in life.where for life in lives)
    assert len({life.where.partition(",")[0] for life in lives}) == 2
    driver.live("ppo", recipe)
    assert_same_outcome(place / "run", expected, after=", ".join(life.where for life in lives))


@pytest.mark.usefixtures("no_report_no_fsync")
def test_sigterm_to_the_command_saves_exits_143_and_the_resumed_run_has_the_same_bits(
    tmp_path: Path, driver: Driver
) -> None:
    place = make_inputs(tmp_path)
    many = {"run.save_every_steps": None, "run.evaluate_every_steps": None, "ppo.num_steps": 7}
    many["reward.1.function"] = "gated_reward:share_of_vowels"
    recipe = changed(recipe_of("ppo", place), many)
    run("ppo", recipe, RunOptions(quiet=True))
    expected = outcome(place / "run")
    (place / "run").rename(place / "uninterrupted")
    command = [sys.executable, "-m", "proximo", "ppo", str(write_recipe(recipe)), "--quiet"]
    metrics = place / "run" / "metrics.jsonl"
    gate = tmp_path / "gate"
    with subprocess.Popen(command, env=environment() | {GATE: str(gate)}) as process:
        wait_until(lambda: process.poll() is not None or (metrics.exists() and metrics.read_bytes().count(b"\n") > 1))
        process.send_signal(signal.SIGTERM)
        gate.touch()
        assert process.wait(LATEST_SECONDS) == 143
    steps = [line["step"] for line in read_lines(metrics)]
    latest = (place / "run" / "checkpoints" / "latest").read_text()
    assert latest == f"step-{steps[-1]:06d}\n"
    assert 0 < steps[-1] < 7
    driver.live("ppo", recipe)
    assert_same_outcome(place / "run", expected, after=f"SIGTERM in step {steps[-1]}")
