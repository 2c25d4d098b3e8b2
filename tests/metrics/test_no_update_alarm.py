"""The alarm for steps without an update: how many raise it, and what it names as the cause."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from made_up_runs import ppo_line

from proximo.metrics.alarms import find_alarms
from proximo.metrics.run_files import Run
from proximo.metrics.shared_declarations import NO_UPDATE
from proximo.ppo.kind import PPO
from proximo.supervised.kinds import SFT


def found(run: Run, kind: Any = PPO) -> list[str]:
    alarms = find_alarms(run, kind.metrics.rules)
    return [each.detail for alarm in alarms for each in (alarm, *alarm.consequences) if each.title == NO_UPDATE]


def made(updates: Sequence[float], *, total: int, settings: Mapping[str, Any] | None = None, **metrics: float) -> Run:
    """A run with the numbers of updates after each step, and these metrics in every step."""
    rng, changes = random.Random(3), {name.replace("__", "/"): value for name, value in metrics.items()}
    lines = [
        ppo_line(step, total, rng) | {"progress/updates": count} | changes for step, count in enumerate(updates, 1)
    ]
    return Run(name="run", lines=tuple(lines), config={"ppo": settings or {}}, total_steps=total)


@pytest.mark.parametrize(
    ("updates", "total", "raised"),
    [
        ([0], 1, True),
        ([4, 4], 2, False),
        ([0, 0], 3, False),
        ([0, 0, 0], 3, True),
        ([4, 8, 8, 8], 8, False),
        ([4, 4, 4, 4, 4], 8, True),
        ([4] * 10, 1000, False),
        ([4] * 11, 1000, True),
        ([*[4] * 11, 5], 1000, False),
    ],
)
def test_so_many_steps_without_an_update_raise_the_alarm(updates: list[float], total: int, raised: bool) -> None:
    assert bool(found(made(updates, total=total, score__mean=0.0))) is raised


@pytest.mark.parametrize(
    ("metrics", "settings", "cause"),
    [
        ({"policy__skipped_updates": 4}, {}, "every update was skipped"),
        ({"policy__stopped_updates": 4}, {}, "ppo.guards.target_kl ended the step"),
        ({"group__effective_fraction": 0}, {}, "in each of them the score is the same number"),
        ({"advantage__flat": 1}, {}, "ppo.advantage.least_spread"),
        ({"policy__rejected_fraction": 1}, {}, "ppo.policy_loss.rejection)"),
        ({"response__finished_fraction": 0}, {"truncation": {"kind": "mask"}}, "ppo.truncation: mask"),
        ({"response__tokens_max": 0}, {}, "no response had a token"),
        ({}, {}, "no token counted"),
    ],
)
def test_each_cause_of_ppo_is_named_by_its_key(metrics: Any, settings: Any, cause: str) -> None:
    (detail,) = found(made([0, 0, 0, 0], total=4, settings=settings, **metrics))
    assert cause in detail
    assert detail.startswith("0 updates in all, none in steps 1 to 4: ")


def test_a_warm_up_of_the_critic_takes_no_updates_by_design() -> None:
    assert not found(made([0] * 12, total=20, settings={"critic_warmup_steps": 12}))
    assert found(made([0] * 16, total=20, settings={"critic_warmup_steps": 12}))


def test_a_run_that_succeeds_may_end_with_nothing_to_learn_but_not_consist_of_it() -> None:
    solved = {"score__best_fraction": 1.0, "score__mean": 1.0}
    assert not found(made([*range(10), *[9] * 20], total=30, **solved))
    assert found(made([0] * 30, total=30, **solved))


def test_a_run_of_other_metrics_raises_nothing() -> None:
    lines = tuple({"step": step, "sft/loss": 1.0} for step in range(1, 20))
    assert not found(Run(name="run", lines=lines, total_steps=20), SFT)
