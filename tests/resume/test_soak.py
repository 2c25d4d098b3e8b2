"""Killed ten times at random moments, each trainer ends with the bits of the uninterrupted run. Takes minutes."""

import random
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from lives import Driver, environment, write_recipe

from run_outcomes import assert_same_outcome, assert_steps_once_in_tensorboard, outcome
from tiny_runs import Kind, changed, make_inputs, recipe_of

NUM_KILLS = 10
NUM_STEPS = 50
LONGER: Mapping[Kind, Mapping[str, Any]] = {
    "sft": {"sft.num_epochs": 20},
    "reward": {"reward.num_epochs": 20},
    "ppo": {"ppo.num_steps": NUM_STEPS},
}
"""Ten rows in updates of four: 20 epochs are 50 steps, more than ten lives of two or three steps take."""


def random_kills(kind: Kind) -> list[dict[str, Any]]:
    """Inside training (by count of calls, and by the clock), inside a save, and around the line between the two."""
    draw = random.Random(f"soak of {kind}")
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
@pytest.mark.parametrize("kind", LONGER)
def test_ten_random_kills_change_nothing(kind: Kind, tmp_path: Path) -> None:
    """Each life is a fresh interpreter; the last one is the command itself, report and all."""
    start = time.perf_counter()
    place = make_inputs(tmp_path)
    recipe = changed(recipe_of(kind, place), {"run.tensorboard": True, **LONGER[kind]})
    with Driver() as driver:
        driver.live(kind, recipe)
    expected = outcome(place / "run")
    (place / "run").rename(place / "uninterrupted")
    lives = []
    for number, kill in enumerate(random_kills(kind), start=1):
        with Driver() as driver:
            lives.append(driver.live(kind, recipe, kill))
        print(f"{kind}, kill {number}: {lives[-1].where}", flush=True)
    finish(kind, recipe)
    assert len(lives) == NUM_KILLS
    assert_same_outcome(place / "run", expected, after=", ".join(life.where for life in lives))
    assert_steps_once_in_tensorboard(place / "run" / "tensorboard", NUM_STEPS)
    assert (place / "run" / "report.html").is_file()
    print(f"{kind}: {len(lives)} kills, {NUM_STEPS} steps, {time.perf_counter() - start:.0f} s")


def finish(kind: Kind, recipe: Mapping[str, Any]) -> None:
    command = [sys.executable, "-m", "proximo", kind, str(write_recipe(recipe)), "--resume=auto", "--quiet"]
    subprocess.run(command, env=environment(), check=True)
