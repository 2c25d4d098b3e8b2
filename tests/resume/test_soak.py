"""Killed ten times at random moments, each trainer ends with the bits of the uninterrupted run. Takes minutes."""

import random
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from lives import Driver, Life, environment, write_recipe

from run_outcomes import assert_same_outcome, assert_steps_once_in_tensorboard, outcome, read_lines
from tiny_runs import IN_AN_ENVIRONMENT, Kind, changed, make_inputs, recipe_of

NUM_KILLS = 10
NUM_STEPS = 50
IN_FLIGHT = "ppo, environments in flight"
LONGER: Mapping[str, tuple[Kind, Mapping[str, Any]]] = {
    "sft": ("sft", {"sft.num_epochs": 20}),
    "reward": ("reward", {"reward.num_epochs": 20}),
    "ppo": ("ppo", {"ppo.num_steps": NUM_STEPS}),
    "ppo, a step ahead": ("ppo", {"ppo.num_steps": NUM_STEPS, "ppo.rollout.staleness": 1}),
    IN_FLIGHT: ("ppo", {"ppo.num_steps": NUM_STEPS, **IN_AN_ENVIRONMENT}),
}
"""Ten rows in updates of four: 20 epochs are 50 steps, more than ten lives of two or three steps take."""


def random_kills(name: str) -> list[dict[str, Any]]:
    """Inside training (by count of calls, and by the clock), inside a save, and around the line between the two."""
    draw = random.Random(f"soak of {name}")
    if name == IN_FLIGHT:  # inside a rollout, of this step or of one of the next
        return [{"at": "turn", "turn": draw.randint(1, 90)} for _ in range(NUM_KILLS)]
    moments = ("before", "torn", "after")
    kills: list[dict[str, Any]] = [
        *({"at": "call", "step": draw.randint(2, 5), "number": draw.randrange(8000)} for _ in range(3)),
        *({"at": "clock", "lines": draw.randint(1, 4), "seconds": draw.uniform(0, 0.1)} for _ in range(2)),
        *(
            {"at": "effect", "save": draw.randint(1, 2), "effect": draw.randrange(30), "moment": draw.choice(moments)}
            for _ in range(3)
        ),
        {"at": "line", "line": draw.randint(1, 4), "moment": "torn"},
        {"at": "line", "line": draw.randint(1, 4), "moment": "after"},
    ]
    draw.shuffle(kills)
    return kills


@pytest.mark.soak
@pytest.mark.parametrize("name", LONGER)
def test_ten_random_kills_change_nothing(name: str, tmp_path: Path) -> None:
    """Each life is a fresh interpreter; the last one is the command itself, report and all."""
    start = time.perf_counter()
    place = make_inputs(tmp_path)
    kind, changes = LONGER[name]
    recipe = changed(recipe_of(kind, place), {"run.tensorboard": True, **changes})
    with Driver() as driver:
        driver.live(kind, recipe)
    expected = outcome(place / "run")
    (place / "run").rename(place / "uninterrupted")
    lives = killed_lives(name, kind, recipe)
    assert name != IN_FLIGHT or all("environments in flight" in life.where for life in lives)
    finish(kind, recipe)
    assert_same_outcome(place / "run", expected, after=", ".join(life.where for life in lives))
    assert_steps_once_in_tensorboard(place / "run" / "tensorboard", NUM_STEPS)
    assert (place / "run" / "report.html").is_file()
    print(f"{name}: {len(lives)} kills, {NUM_STEPS} steps, {time.perf_counter() - start:.0f} s")


@pytest.mark.soak
def test_ten_random_kills_of_a_run_that_samples_four_steps_ahead(tmp_path: Path) -> None:
    """Its tokens depend on the clock, so bits differ; each step is taken once, on its prompts, within the bound."""
    place = make_inputs(tmp_path)
    ahead = {"ppo.num_steps": NUM_STEPS, "ppo.rollout.staleness": 4, "run.samples_per_step": 4}
    recipe = changed(recipe_of("ppo", place), {"run.tensorboard": True, **ahead})
    with Driver() as driver:
        driver.live("ppo", recipe)
    expected = asked_prompts(place / "run")
    (place / "run").rename(place / "uninterrupted")
    killed_lives("ppo, four steps ahead", "ppo", recipe)
    finish("ppo", recipe)
    assert asked_prompts(place / "run") == expected
    lines = read_lines(place / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(NUM_STEPS + 1))
    assert max(line.get("staleness/max_steps", 0) for line in lines) == 4
    assert_steps_once_in_tensorboard(place / "run" / "tensorboard", NUM_STEPS)


def asked_prompts(folder: Path) -> list[tuple[int, str]]:
    """Step and prompt of every response that is logged."""
    return [(line["step"], line["prompt_id"]) for line in read_lines(folder / "samples.jsonl")]


def killed_lives(name: str, kind: Kind, recipe: Mapping[str, Any]) -> list[Life]:
    lives = []
    for number, kill in enumerate(random_kills(name), start=1):
        with Driver() as driver:
            lives.append(driver.live(kind, recipe, kill))
        print(f"{name}, kill {number}: {lives[-1].where}", flush=True)
    assert len(lives) == NUM_KILLS
    return lives


def finish(kind: Kind, recipe: Mapping[str, Any]) -> None:
    command = [sys.executable, "-m", "proximo", kind, str(write_recipe(recipe)), "--resume=auto", "--quiet"]
    subprocess.run(command, env=environment(), check=True)
