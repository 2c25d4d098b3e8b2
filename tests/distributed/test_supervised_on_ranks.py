"""SFT, reward models, DPO and KTO on one, two and three ranks: the same losses, gradients, evaluations and weights."""

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.ranks import Ranks
from distributed.supervised_runs import (
    EACH_MICROBATCH,
    EVERY_CASE,
    EVERY_WAY,
    FULL,
    GRADS,
    NUM_UPDATES,
    OFFLOADED,
    REPLICATE,
    TIGHT,
    Trainer,
    built,
    gradients,
    run_case,
)
from tiny_runs import LORA, make_inputs

FEW_UPDATES = 4
"""The first ones of a run that has `NUM_UPDATES`."""


@cache
def on_one_rank(trainer: Trainer, case: str, num_updates: int = FEW_UPDATES) -> dict[str, Any]:
    return run_case(trainer, case, {}, num_updates=num_updates)


@cache
def gradients_on_one_rank(trainer: Trainer, case: str) -> dict[str, torch.Tensor]:
    return gradients(trainer, case, {})


def relative(found: float, wanted: float) -> float:
    return abs(found - wanted) / max(abs(wanted), 1e-2)


def check(found: dict[str, Any], wanted: dict[str, Any], bound: float) -> None:
    for line, other in zip(found["lines"], wanted["lines"], strict=True):
        assert line.keys() == other.keys()
        for name, value in other.items():
            assert relative(line[name], value) < bound, name
    for sample, other in zip(found["samples"], wanted["samples"], strict=True):
        assert sample.keys() == other.keys()
        for name, value in other.items():
            numbers, others = (each if isinstance(each, list) else [each] for each in (sample[name], value))
            for one, another in zip(numbers, others, strict=True):
                assert relative(one, another) < bound if isinstance(another, float) else one == another, name
    assert found["weights"].keys() == wanted["weights"].keys()
    for name, weight in wanted["weights"].items():
        difference = (found["weights"][name] - weight).abs().max() / weight.abs().max().clamp(min=1e-2)
        assert difference < bound, name


def check_case(
    ranks: Ranks, trainer: Trainer, case: str, devices: dict[str, Any], num_updates: int = FEW_UPDATES
) -> None:
    wanted = on_one_rank(trainer, case, num_updates)
    results = ranks.run(partial(run_case, num_updates=num_updates), trainer, case, devices)
    for found in results:
        check(found, wanted, TIGHT)
        # What the ranks log and decide by is the same to the last bit.
        assert repr(found["lines"]) == repr(results[0]["lines"])
        assert found["samples"] == results[0]["samples"]
        assert all(weight.equal(results[0]["weights"][name]) for name, weight in found["weights"].items())


@pytest.mark.parametrize(
    ("trainer", "case", "devices"),
    [
        ("sft", "accumulation", FULL),
        ("sft", "accumulation", EACH_MICROBATCH),
        ("reward", "accumulation", OFFLOADED),
        ("reward", "accumulation", REPLICATE),
        ("dpo", "accumulation", GRADS),
        ("sft", "in_backward", FULL),
        ("reward", "divergence_window", REPLICATE),
        ("reward", "frozen", GRADS),
        ("reward", "lora", FULL),
        ("prm", "accumulation", REPLICATE),
        ("dpo", "ipo", FULL),
        ("dpo", "lora_few_rows", FULL),
        ("dpo", "checkpointing", FULL),
        ("kto", "accumulation", FULL),
    ],
    ids=str,
)
def test_two_ranks_train_as_one(two: Ranks, trainer: Trainer, case: str, devices: dict[str, Any]) -> None:
    check_case(two, trainer, case, devices)


@pytest.mark.parametrize(
    ("trainer", "devices"),
    [("sft", REPLICATE), ("reward", FULL), ("prm", FULL), ("dpo", GRADS), ("kto", GRADS)],
    ids=str,
)
def test_three_ranks_train_as_one_also_where_two_of_them_have_no_row(
    three: Ranks, trainer: Trainer, devices: dict[str, Any]
) -> None:
    check_case(three, trainer, "few_rows", devices)


@pytest.mark.parametrize(
    ("trainer", "case", "devices"),
    [
        ("sft", "experts", FULL),
        ("dpo", "experts", REPLICATE),
        ("reward", "experts", GRADS),
        ("sft", "experts_few_rows", REPLICATE),
        ("kto", "experts_few_rows", FULL),
    ],
    ids=str,
)
def test_experts_are_balanced_over_all_ranks(two: Ranks, trainer: Trainer, case: str, devices: dict[str, Any]) -> None:
    wanted = on_one_rank(trainer, case)
    assert any(name.endswith("/balancing_loss") for name in wanted["lines"][0])
    for found in two.run(partial(run_case, num_updates=FEW_UPDATES), trainer, case, devices):
        check(found, wanted, 1e-4)  # routers compute in float32


@pytest.mark.soak
@pytest.mark.parametrize("devices", EVERY_WAY, ids=str)
@pytest.mark.parametrize(("trainer", "case"), EVERY_CASE)
def test_two_and_three_ranks_train_every_case_as_one_however_the_model_lies(
    two: Ranks, three: Ranks, trainer: Trainer, case: str, devices: dict[str, Any]
) -> None:
    for ranks in (two, three):
        check_case(ranks, trainer, case, devices, NUM_UPDATES)


def check_gradients(ranks: Ranks, trainer: Trainer, case: str, devices: dict[str, Any], bound: float) -> None:
    wanted = gradients_on_one_rank(trainer, case)
    for found in ranks.run(gradients, trainer, case, devices):
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            assert found[name].dtype is gradient.dtype is torch.float32
            assert (found[name] - gradient).norm() <= bound * gradient.norm(), name


@pytest.mark.parametrize(("trainer", "devices"), [("reward", REPLICATE), ("dpo", FULL), ("kto", GRADS)], ids=str)
def test_gradients_in_float32_are_those_of_one_rank(two: Ranks, trainer: Trainer, devices: dict[str, Any]) -> None:
    check_gradients(two, trainer, "accumulation", devices, 1e-5)


@pytest.mark.parametrize(
    ("trainer", "devices"),
    [("sft", FULL), ("reward", GRADS), ("dpo", REPLICATE)],
    ids=str,
)
def test_gradients_in_bf16_are_those_of_one_rank(two: Ranks, trainer: Trainer, devices: dict[str, Any]) -> None:
    """But for how often bf16 rounds, by 2^-8 at most: sums over micro-batches and ranks are in float32."""
    check_gradients(two, trainer, "bf16", devices, 0.02)


def test_dropout_repeats_itself_on_ranks_and_is_not_that_of_one_rank(two: Ranks) -> None:
    first, again = (two.run(partial(run_case, num_updates=FEW_UPDATES), "sft", "dropout", FULL)[0] for _ in range(2))
    assert first["lines"] == again["lines"]
    wanted = on_one_rank("sft", "dropout")
    assert relative(first["lines"][0]["sft/loss"], wanted["lines"][0]["sft/loss"]) > 1e-4
    assert relative(first["lines"][0]["sft/loss"], on_one_rank("sft", "accumulation")["lines"][0]["sft/loss"]) > 1e-4


@pytest.mark.parametrize(
    ("trainer", "changes", "sharded"),
    [
        ("reward", {"devices.model.shard": "grads"}, [True]),
        ("dpo", {"devices.reference.shard": "replicate"}, [True, False]),
        ("kto", {"model.lora": LORA}, [True, True]),
    ],
    ids=str,
)
def test_a_recipe_builds_the_same_task_on_ranks(
    two: Ranks, tmp_path: Path, trainer: Trainer, changes: dict[str, Any], sharded: list[bool]
) -> None:
    place = str(make_inputs(tmp_path))
    wanted = built(trainer, place, changes)
    for found in two.run(built, trainer, place, changes):
        assert found["sharded"] == sharded
        assert wanted["sharded"] == [False] * len(sharded)
        assert found["fingerprint"] == wanted["fingerprint"]
        for line, other in zip(found["lines"], wanted["lines"], strict=True):
            assert line.keys() == other.keys()
            assert all(relative(line[name], value) < 1e-4 for name, value in other.items())
