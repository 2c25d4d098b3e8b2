"""An evaluation gives each held-out row its own scores, however its rows are cut; a skipped update leaves no loss."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from supervised.test_dpo import task as dpo_task
from supervised.test_dpo import two_models
from supervised.test_kto import task as kto_task
from supervised.test_prm import prm_task
from supervised.test_supervised import reward_task

MADE: dict[str, Callable[[int], Any]] = {
    "reward": lambda budget: reward_task(torch.float64, tokens_per_microbatch=budget),
    "prm": lambda budget: prm_task(torch.float64, tokens_per_microbatch=budget),
    "dpo": lambda budget: dpo_task(*two_models(), tokens_per_microbatch=budget),
    "kto": lambda budget: kto_task(*two_models(), tokens_per_microbatch=budget),
}


@pytest.mark.parametrize("kind", MADE)
def test_every_row_has_its_own_scores_whatever_the_micro_batches_are(kind: str) -> None:
    found = []
    for budget in (8192, 24):
        task = MADE[kind](budget)
        task.held_out = task.examples
        assert (len(task.batches(task.held_out)) > 1) == (budget == 24)
        found.append(task.evaluate())
    whole, cut = found
    assert whole.metrics.keys() == cut.metrics.keys()
    assert len(whole.samples) == len(cut.samples) == len(task.held_out)
    for mine, theirs in zip(whole.samples, cut.samples, strict=True):
        numbers = {name for name, value in mine.items() if isinstance(value, float)}
        assert numbers
        assert {name: mine[name] for name in numbers} == pytest.approx({name: theirs[name] for name in numbers})
        assert all(mine[name] == theirs[name] for name in mine.keys() - numbers - {"probabilities"})
    assert len({sample.get("score", sample.get("score_chosen")) for sample in whole.samples}) > 1


@pytest.mark.parametrize("kind", MADE)
def test_an_update_that_is_skipped_leaves_no_loss(kind: str) -> None:
    task = MADE[kind](8192)
    with torch.no_grad():
        next(task.model.model.parameters()).fill_(math.nan)
    metrics = task.step(1).metrics
    assert metrics[f"{task.metric_group}/skipped_updates"].value == 1
    assert metrics[f"{task.metric_group}/loss"].count == 0
