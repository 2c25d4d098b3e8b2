"""A rank that raises, or whose data alone trips a guard, leaves no other one waiting: all end, or go on, alike."""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from builders import tiny_language_model, tiny_tokenizer
from distributed.ranks import SOON_SECONDS, RankEnd, Ranks, joined
from proximo.algorithms.losses import PolicyStatistics
from proximo.checkpoint import ranks
from proximo.checkpoint.store import CheckpointStore
from proximo.config.devices import DevicesConfig
from proximo.config.ppo.options import PPOConfig
from proximo.distributed.world import checksum, current, whole
from proximo.errors import ProximoError
from proximo.models.language import LanguageModel
from proximo.models.scalar import HeadStart, scalar_from_language_model
from proximo.ppo.calls import OwnCall
from proximo.ppo.roles.policy import PolicyWorker
from proximo.ppo.roles.value import ValueWorker
from proximo.ppo.roles.worker import ReferenceWorker
from proximo.ppo.task import PPOTask
from proximo.ppo.trainer import PPOTrainer
from proximo.rewards.function import FunctionReward
from proximo.rewards.model import ModelReward
from proximo.rewards.weighted import WeightedReward
from proximo.rollout.local import LocalEngine
from proximo.run.make.sharding import shard_model
from proximo.run.options import RunOptions
from tiny_runs import changed, make_inputs, recipe_of, run

PROMPTS = ["ab", "cdefgh", "i", "jkl"]
RESPONSES = [[9, 8, 7], [6, 5], [20, 21, 22, 23], [24]]
SCORES = [1.0, 0.0, 0.5, 2.0]
FULL, GRADS, WHOLE = {"shard": "full"}, {"shard": "grads"}, {"shard": "replicate"}


class Fault(Exception):
    """Raised on one rank."""


def length(prompts: Sequence[Any], responses: Sequence[str], metadata: Sequence[Any]) -> list[float]:
    del prompts, metadata
    return [float(len(text)) for text in responses]


def noted(*given: Any) -> dict[str, float]:
    del given
    return {"noted": 1.0}


def on_step(number: int, metrics: Mapping[str, float]) -> None:
    del number, metrics


def trainer(devices: Mapping[str, Any], **options: Any) -> PPOTrainer:
    base: dict[str, Any] = {
        "num_steps": 2,
        "prompts_per_step": 4,
        "epochs_per_step": 1,
        "minibatch_responses": 2,
        "rollout": {"max_new_tokens": 4},
        "policy_optimizer": {"learning_rate": 1e-3},
        "guards": {"max_skipped_fraction": 1.0},
    }
    made = DevicesConfig.model_validate(devices)
    judge = scalar_from_language_model(LanguageModel(tiny_language_model(seed=1)), HeadStart.NORMAL, seed=2)
    shard_model(judge, made, role="reward")
    return PPOTrainer(
        tiny_language_model(seed=3),
        tiny_tokenizer(),
        reward=WeightedReward([(1.0, ModelReward(judge, name="judge")), (1.0, FunctionReward(length))]),
        config=PPOConfig(**(base | options)),
        devices=made,
        own_calls=[OwnCall(at="experience", does="measure", function=lambda *given: noted(*given))],  # noqa: PLW0108 - looked up when it is called,
    )


PLACES: dict[str, tuple[Any, str]] = {
    "rollout": (PolicyWorker, "generate"),
    "the engine": (LocalEngine, "generate"),
    "push of weights": (PolicyWorker, "push_weights"),
    "scores": (ModelReward, "score"),
    "a pass for scores": (ModelReward, "_scores"),
    "log-probs of the policy": (PolicyWorker, "logprobs"),
    "log-probs of the reference": (ReferenceWorker, "logprobs"),
    "values": (ValueWorker, "values"),
    "training of the policy": (PolicyWorker, "train"),
    "loss of the policy": (PolicyWorker, "_loss"),
    "full KL": (ReferenceWorker, "divergence"),
    "training of the value model": (ValueWorker, "train"),
    "loss of the value model": (ValueWorker, "loss"),
    "forward of a layer": (PolicyWorker, "_hidden"),
    "backward of the head": (PolicyWorker, "_hidden"),
    "backward of a layer": (PolicyWorker, "_hidden"),
}
"""Methods that every rank calls in a step. The last three have a layer raise in the pass that they begin."""
EFFECTS: dict[str, tuple[Any, str]] = {
    "a reward function": (FunctionReward, "score"),
    "a call of the user's": (sys.modules[__name__], "noted"),
    "on_step": (sys.modules[__name__], "on_step"),
}
"""What rank 0 alone calls."""
SAVES: dict[str, tuple[Any, str]] = {
    "the state to save": (PPOTask, "state"),
    "the shards of a save": (ranks, "_written"),
    "the manifest of a save": (CheckpointStore, "_publish"),
}


def break_here(place: str) -> None:
    """Have a place raise, in this process."""
    owner, name = (PLACES | EFFECTS | SAVES)[place]
    original = getattr(owner, name)

    def fail(*_: Any) -> Any:
        raise Fault(f"in {place}")

    @wraps(original)
    def broken(*arguments: Any, **named: Any) -> Any:
        if "ward of" not in place:
            fail()
        worker = arguments[0]
        first, *_, last = worker.model.base.model.layers
        if place == "forward of a layer":
            last.register_forward_pre_hook(fail)
        if place == "backward of a layer":
            first.register_forward_hook(lambda _layer, _given, output: output.register_hook(fail) and None)
        hidden = original(*arguments, **named)
        if place == "backward of the head":
            hidden.register_hook(fail)
        return hidden

    setattr(owner, name, broken)


def take_steps(place: str, rank: int, devices: Mapping[str, Any]) -> None:
    full_kl = {"estimator": "full", "kind": "loss", "coefficient": 0.1}
    # Weights by the sampler's log-probs have the policy compute its own again.
    made = trainer(devices, kl=full_kl, policy_loss={"behaviour_weight": "truncated"})
    if current().rank == rank:
        break_here(place)
    made.train(PROMPTS, on_step=on_step)


def run_recipe(place: str, rank: int, folder: Path) -> None:
    if current().rank == rank:
        break_here(place)
    changes = {"devices.shard": "full", "ppo.num_steps": 3, "run.evaluate_every_steps": None}
    run("ppo", changed(recipe_of("ppo", folder), changes), RunOptions(quiet=True))


def check_ends(ends: Sequence[RankEnd], place: str, rank: int) -> None:
    """One rank raised the fault, and the other one soon an error that names that rank and the fault."""
    own, other = ends[rank], ends[1 - rank]
    fault = f"(Fault: )?in {place}"
    of_save = rf"CheckpointError: .*rank {rank}: {fault}"
    named = rf"RankError: rank {rank}( \(process \d+ on \S+\) failed)?: .*{fault}"
    print(f"{place}, rank {rank}: {other.at - own.at:.2f} s; {own.error[:200]} | {other.error[:300]}")
    assert re.match(f"{fault}|TrainingError: .* raised {fault}|{of_save}", own.error)
    assert re.match(f"{named}|{of_save}" if place != "on_step" else fault, other.error)
    assert abs(other.at - own.at) < SOON_SECONDS
    assert [end.status for end in ends] == [0, 0], "no process had to be ended"


FEW = [
    ("log-probs of the policy", 1),
    ("a call of the user's", 0),
    ("backward of a layer", 1),
]
ALL = [*((place, rank) for place in PLACES for rank in (0, 1)), *((place, 0) for place in EFFECTS)]


@pytest.mark.parametrize(("place", "rank"), FEW)
def test_all_ranks_end_where_one_raises_in_a_step(place: str, rank: int) -> None:
    check_ends(joined(take_steps, place, rank, FULL), place, rank)


@pytest.mark.soak
@pytest.mark.parametrize("devices", [FULL, GRADS, WHOLE], ids=lambda devices: devices["shard"])
@pytest.mark.parametrize(("place", "rank"), ALL)
def test_all_ranks_end_wherever_one_raises_in_a_step(place: str, rank: int, devices: Mapping[str, Any]) -> None:
    check_ends(joined(take_steps, place, rank, devices), place, rank)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("place", "rank"),
    [
        ("the state to save", 0),
        ("the state to save", 1),
        ("the shards of a save", 0),
        ("the shards of a save", 1),
        ("the manifest of a save", 0),
    ],
)
def test_all_ranks_end_where_one_raises_in_a_save(place: str, rank: int, tmp_path: Path) -> None:
    check_ends(joined(run_recipe, place, rank, make_inputs(tmp_path)), place, rank)


def of_one_rank(what: str) -> Callable[..., tuple[Tensor, PolicyStatistics]]:
    """`PolicyWorker._loss` in which the second and later updates of rank 1 have other numbers than its data gives."""
    original = PolicyWorker._loss

    def loss(worker: PolicyWorker, *given: Any) -> tuple[Tensor, PolicyStatistics]:
        value, found = original(worker, *given)
        if current().rank == 0 or (worker.version == 0 and what != "max_abs_log_ratio"):
            return value, found
        match what:
            case "loss":
                return value * float("nan"), found
            case "gradient":
                value.register_hook(lambda gradient: gradient * float("nan"))
                return value, found
        return value, replace(found, **{what: getattr(found, what) + 1e3})

    return loss


def step_twice(what: str, devices: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """How a step ends in which rank 1 alone has other numbers, the step after it, and the weights."""
    made, original = trainer(devices, **options), PolicyWorker._loss
    ends: list[Any] = []
    for loss in (of_one_rank(what), original):
        PolicyWorker._loss = loss
        try:
            line = made.step(PROMPTS, RESPONSES, SCORES)
            names = ("policy/skipped_updates", "policy/stopped_updates", "policy/loss", "progress/updates")
            ends.append({name: line[name] for name in names if name in line})
        except ProximoError as error:
            ends.append(f"{type(error).__name__}: {error}")
            break
        finally:
            PolicyWorker._loss = original
    weights = [whole(weight).detach().clone() for weight in made.policy.model.parameters()]
    return {"ends": ends, "checksum": checksum(weights), "finite": all(bool(each.isfinite().all()) for each in weights)}


EARLY = {"learning_rate": 1e-3, "max_gradient_norm": None, "non_finite_gradient": "stop", "in_backward": True}
STRAYING: dict[str, tuple[str, dict[str, Any], str | dict[str, float]]] = {
    "max_ratio": ("ratio", {"guards": {"max_ratio": 2.0, "max_skipped_fraction": 1.0}}, {"policy/skipped_updates": 1}),
    "max_kl": ("k3", {"guards": {"max_kl": 0.1, "max_skipped_fraction": 1.0}}, {"policy/skipped_updates": 1}),
    "target_kl": ("k3", {"guards": {"target_kl": 0.1}}, {"policy/stopped_updates": 1}),
    "max_skipped_fraction": (
        "k3",
        {"guards": {"max_kl": 0.1, "max_skipped_fraction": 0.3}},
        "Training.*skipped",
    ),
    "the first minibatch": ("max_abs_log_ratio", {}, "Training.*sampler and learner disagree"),
    "a loss": ("loss", {}, {"policy/skipped_updates": 1}),
    "a gradient": (
        "gradient",
        {"policy_optimizer": {"learning_rate": 1e-3, "non_finite_gradient": "stop"}},
        "Training.*the gradient norm is nan",
    ),
    "a gradient to skip": ("gradient", {"policy_optimizer": {"learning_rate": 1e-3}}, {"policy/skipped_updates": 1}),
    "a loss, in_backward": ("loss", {"policy_optimizer": EARLY}, {"policy/skipped_updates": 1}),
    "a gradient, in_backward": ("gradient", {"policy_optimizer": EARLY}, "Training.*the weights have moved"),
}
"""What strays on rank 1, the options, and how both ranks end: with an error, or with these metrics."""


@pytest.mark.parametrize(
    ("kind", "devices"),
    [(kind, (FULL, WHOLE)[number % 2]) for number, kind in enumerate(STRAYING)],
    ids=str,
)
def test_numbers_of_one_rank_end_an_update_alike_on_all(two: Ranks, kind: str, devices: Mapping[str, Any]) -> None:
    what, options, wanted = STRAYING[kind]
    first, second = two.run(step_twice, what, devices, options)
    assert first == second
    end, *rest = first["ends"]
    if isinstance(wanted, str):
        assert re.match(wanted, end), end
        return
    assert wanted.items() <= end.items()
    assert end["progress/updates"] == 1
    assert [each["progress/updates"] for each in rest] == [3], "the next step is taken"
    assert first["finite"]
