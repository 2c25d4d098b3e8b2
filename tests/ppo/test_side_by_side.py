"""Policy and value model that train at the same time learn what they learn one after the other."""

import itertools
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from builders import tiny_language_model, tiny_tokenizer
from proximo.config.ppo.options import PPOConfig
from proximo.dataflow import executor
from proximo.errors import TrainingError
from proximo.learner.own_optimizer import OwnOptimizer
from proximo.learner.update import Learner
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions
from proximo.models.precision.placement import Precision
from proximo.models.scalar import HeadStart, scalar_from_language_model
from proximo.plan.profiling import make_plans
from proximo.ppo.extra_calls import ExtraCall
from proximo.ppo.recipe import PPORecipe
from proximo.ppo.roles.policy import PolicyWorker
from proximo.ppo.roles.value import ValueWorker
from proximo.ppo.trainer import PPOTrainer
from proximo.ppo.update.overlap import MOST_WEIGHTS, best_split, cost_of_updates, overlaps_updates
from tiny_runs import changed, make_inputs, recipe_of

PROMPTS = ["one", "two", "three", "four"]
UNTOLD_CALLS = 1
"""`sampled_logprobs`, whose seconds are in those of the step alone."""
RATES = {"policy_optimizer": {"learning_rate": 1e-2}, "value_optimizer": {"learning_rate": 1e-2}}


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Call -> name of the thread in which it last ran."""
    found: dict[str, str] = {}
    for name, worker in (("train_policy", PolicyWorker), ("train_value", ValueWorker)):
        original = worker.train

        def noting(self: Any, *given: Any, name: str = name, original: Any = original, **more: Any) -> Any:
            found[name] = threading.current_thread().name
            return original(self, *given, **more)

        monkeypatch.setattr(worker, "train", noting)
    return found


def trainer(**options: Any) -> PPOTrainer:
    """`options` of the configuration, but for what PPOTrainer takes itself."""
    policy = options.pop("policy", None) or tiny_language_model()
    given = {name: options.pop(name) for name in ("extra_calls", "optimizers", "value") if name in options}
    rates = {} if "optimizers" in given else RATES
    config = PPOConfig(num_steps=4, prompts_per_step=4, rollout={"max_new_tokens": 6}, **(rates | options))
    return PPOTrainer(policy, tiny_tokenizer(), config=config, **given)


def steps(made: PPOTrainer, count: int = 2) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """All weights after some steps, and the metrics of each."""
    history = []
    for _ in range(count):
        responses = made.generate(PROMPTS)
        history.append(made.step(PROMPTS, responses, [float(len(set(each.token_ids))) for each in responses]))
    value = made.roles.value
    assert value is not None
    weights = {f"policy.{name}": tensor for name, tensor in made.policy.model.state_dict().items()}
    return weights | {f"value.{name}": tensor for name, tensor in value.model.model.state_dict().items()}, history


def test_they_learn_the_same_and_a_repetition_has_the_same_bits(two_threads: None, lanes: dict[str, str]) -> None:
    together, metrics = steps(trainer())
    assert lanes == {"train_policy": "MainThread", "train_value": "second-task"}
    again, _ = steps(trainer())
    assert all(torch.equal(together[name], again[name]) for name in together)
    lanes.clear()
    alone, others = steps(trainer(overlap_updates=False))
    assert set(lanes.values()) == {"MainThread"}
    for name, tensor in together.items():
        torch.testing.assert_close(tensor, alone[name], rtol=1e-4, atol=1e-5)
    for name, number in metrics[-1].items():
        if not name.startswith(("time/", "throughput/", "memory/")):
            assert number == pytest.approx(others[-1][name], rel=1e-3, abs=1e-4, nan_ok=True), name


VARIANTS: dict[str, dict[str, Any]] = {
    "extra pass": {"policy_loss": {"objective": "m2po"}},
    "KL over all tokens in the loss": {"kl": {"apply_to": "loss", "estimator": "full"}},
    "micro-batches": {"tokens_per_microbatch": 20},
    "normalised values": {"value_loss": {"normalise": "exponential"}},
}


@pytest.mark.parametrize("variant", [*VARIANTS, "adapter", "bf16", "checkpointing"])
def test_every_kind_of_update_has_the_same_bits_again(variant: str, two_threads: None, lanes: dict[str, str]) -> None:
    def made() -> PPOTrainer:
        precision = Precision.BF16 if variant == "bf16" else Precision.FLOAT32
        policy = LanguageModel(tiny_language_model(), precision=precision)
        if variant == "adapter":
            policy = policy.with_adapter(LoRAOptions(rank=2))
        if variant == "checkpointing":
            policy.use_activation_checkpointing()
        return trainer(policy=policy, **VARIANTS.get(variant, {}))

    (first, history), (second, again) = steps(made()), steps(made())
    assert lanes == {"train_policy": "MainThread", "train_value": "second-task"}
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert history[-1]["value/loss"] == again[-1]["value/loss"]


def test_an_optimizer_that_was_brought_is_alone(two_threads: None, lanes: dict[str, str]) -> None:
    made = trainer(optimizers={"policy": OwnOptimizer(make=lambda given: torch.optim.SGD(given, lr=1e-2))})
    steps(made, count=1)
    assert set(lanes.values()) == {"MainThread"}


def test_where_memory_counts_they_train_one_after_the_other(two_threads: None, lanes: dict[str, str]) -> None:
    early = {"learning_rate": 1e-2, "in_backward": True, "max_gradient_norm": None, "non_finite_gradient": "stop"}
    steps(trainer(value_optimizer=early, minibatch_responses=4), count=1)
    assert set(lanes.values()) == {"MainThread"}


def test_each_condition_stands_against_it_by_itself() -> None:
    config, plain = PPOConfig(), {"device": "cpu", "shares_trunk": False, "num_threads": 2}
    assert overlaps_updates(config, **plain)
    for name in ("shares_trunk", "compiled", "quantised", "own_optimizers"):
        assert not overlaps_updates(config, **plain | {name: True}), name
    assert not overlaps_updates(config, **plain | {"device": "cuda"})
    assert overlaps_updates(config, **plain | {"num_weights": MOST_WEIGHTS})
    assert not overlaps_updates(config, **plain | {"num_weights": MOST_WEIGHTS + 1})
    assert not overlaps_updates(PPOConfig(advantage="group_standardised", responses_per_prompt=4), **plain)


def test_the_seconds_of_the_calls_add_up_to_those_of_the_step(
    two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that goes on by a second whenever it is read, so that no machine is too slow or too busy."""
    readings = itertools.count()
    monkeypatch.setattr(executor, "time", SimpleNamespace(perf_counter=lambda: float(next(readings))))
    _, history = steps(trainer())
    whole = history[-1]["time/step_seconds"]
    parts = {name: seconds for name, seconds in history[-1].items() if name.startswith("time/") and "step" not in name}
    together = parts.pop("time/train_policy_seconds") + parts.pop("time/train_value_seconds")
    assert together == pytest.approx(5)  # the beginning and end of each, and the end of both
    assert set(parts.values()) == {1.0}
    assert whole == pytest.approx(together + sum(parts.values()) + UNTOLD_CALLS)


def test_the_value_model_has_a_lane_on_every_second_thread_alone(lanes: dict[str, str]) -> None:
    for threads in (1, 3):
        torch.set_num_threads(threads)
        steps(trainer(), count=1)
        assert set(lanes.values()) == {"MainThread"}


def test_a_counter_of_operations_sees_both_updates(two_threads: None, lanes: dict[str, str]) -> None:
    with FlopCounterMode(display=False) as counter:
        steps(trainer(), count=1)
    assert set(lanes.values()) == {"MainThread"}
    torch.set_num_threads(1)
    with FlopCounterMode(display=False) as alone:
        steps(trainer(), count=1)
    assert counter.get_total_flops() == alone.get_total_flops() > 0


def test_an_error_of_the_policy_ends_the_step_as_it_does_alone(
    two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainer()

    def refuse(*_: Any, **__: Any) -> None:
        raise TrainingError("the learner's log-probs are not the sampler's")

    monkeypatch.setattr("proximo.ppo.roles.policy.check_first_minibatch", refuse)
    with pytest.raises(TrainingError, match="not the sampler's"):
        steps(made, count=1)
    assert made.state.steps_done == 0
    assert torch.get_num_threads() == 2


def test_an_extra_call_between_them_finds_the_value_model_as_it_was(two_threads: None, lanes: dict[str, str]) -> None:
    seen = []
    look = ExtraCall(
        name="look", reads=("policy_report",), writes=("one",), function=lambda _: seen.append({*lanes}) or 1
    )
    steps(trainer(extra_calls=[look]), count=1)
    assert seen == [{"train_policy"}]
    assert lanes == dict.fromkeys(("train_policy", "train_value"), "MainThread")


def test_large_models_train_one_after_the_other_in_a_step_and_in_the_plan(
    two_threads: None, lanes: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr("proximo.ppo.update.overlap.MOST_WEIGHTS", 1000)
    steps(trainer(), count=1)
    assert set(lanes.values()) == {"MainThread"}
    gradients = {}
    for threads in (1, 2):
        recipe = changed(recipe_of("ppo", make_inputs(tmp_path / str(threads))), {"run.num_threads": threads})
        (plan,) = make_plans(PPORecipe.model_validate(recipe))
        gradients[threads] = next(p.parts["gradients"] for p in plan.phases if p.name == "train_policy")
    assert gradients[1] == gradients[2]


@pytest.mark.parametrize(("threads", "option", "both"), [(2, True, True), (1, True, False), (2, False, False)])
def test_the_plan_has_the_memory_of_both_updates(threads: int, option: bool, both: bool, tmp_path: Any) -> None:
    place = make_inputs(tmp_path)

    def phases(**changes: Any) -> dict[str, Any]:
        recipe = changed(recipe_of("ppo", place), changes)
        (plan,) = make_plans(PPORecipe.model_validate(recipe))
        return {phase.name: phase.parts for phase in plan.phases}

    found = phases(**{"run.num_threads": threads, "ppo.overlap_updates": option})
    alone = phases(**{"run.num_threads": 1})
    gradients = alone["train_policy"]["gradients"] + (alone["train_value"]["gradients"] if both else 0)
    assert found["train_policy"]["gradients"] == gradients
    assert found["values"] == alone["values"]


def test_the_dearer_model_takes_its_last_updates_with_all_threads() -> None:
    assert best_split(16, 1.0, 1.0) == best_split(16, 0.5, 1.0) == 16
    assert best_split(16, 1.1, 1.0) == 15  # 16.5 beside 16, then one: 17.2 in all; all beside take 17.6, with 14 17.4
    assert best_split(16, 1.16, 1.0) == 14
    assert best_split(2, 1.1, 1.0) == 2
    assert best_split(4, 100.0, 1.0) == 0
    assert best_split(0, 2.0, 1.0) == 0


def test_the_cost_of_updates_counts_matrices_of_the_layers_and_the_output_layer_on_responses() -> None:
    policy = LanguageModel(tiny_language_model())
    value = scalar_from_language_model(policy, HeadStart.ZERO)
    prompt = SimpleNamespace(response=SimpleNamespace(prompt=SimpleNamespace(token_ids=(5, 6, 7))))
    experience: Any = SimpleNamespace(scored=[prompt, prompt], lengths=(4, 6))
    layers = 2 * (4 * 16 * 16 + 3 * 16 * 32)
    assert cost_of_updates(value, experience) == 3 * layers * 16
    assert cost_of_updates(policy, experience) == 3 * layers * 16 + 4 * 64 * 16 * 10
    policy.use_activation_checkpointing()
    assert cost_of_updates(policy, experience) == 4 * layers * 16 + 4 * 64 * 16 * 10
    adapted = LanguageModel(tiny_language_model()).with_adapter(LoRAOptions(rank=2))
    adapters = sum(tensor.numel() for _, tensor in adapted.trainable_parameters())
    assert cost_of_updates(adapted, experience) == (2 * layers + 3 * adapters) * 16 + 3 * 64 * 16 * 10


def noting_threads(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Lane -> how many threads each of its updates had."""
    threads: dict[str, list[int]] = {"MainThread": [], "second-task": []}
    original = Learner.update

    def noting(self: Learner, *given: Any, **more: Any) -> Any:
        threads[threading.current_thread().name].append(torch.get_num_threads())
        return original(self, *given, **more)

    monkeypatch.setattr(Learner, "update", noting)
    return threads


def test_a_larger_value_model_takes_its_last_updates_with_all_threads_though_the_policy_ends_early(
    two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = noting_threads(monkeypatch)
    large = scalar_from_language_model(LanguageModel(tiny_language_model(num_hidden_layers=6)), HeadStart.ZERO)
    options = {"epochs_per_step": 4, "minibatch_responses": 1, "guards": {"target_kl": 1e-9}}
    steps(trainer(value=large, **options), count=1)
    beside = threads["second-task"].count(1)
    assert 4 <= beside <= 12
    assert threads["second-task"] == [1] * beside + [2] * (16 - beside)
    assert len(threads["MainThread"]) < 16
    assert set(threads["MainThread"]) == {1}


def test_in_a_run_the_last_updates_of_the_policy_have_all_threads(
    two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = noting_threads(monkeypatch)
    options = {"epochs_per_step": 4, "minibatch_responses": 1}
    first, _ = steps(trainer(**options), count=1)
    beside = threads["MainThread"].count(1)
    assert 8 <= beside <= 15
    assert threads == {"MainThread": [1] * beside + [2] * (16 - beside), "second-task": [1] * 16}
    again, _ = steps(trainer(**options), count=1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    alone, _ = steps(trainer(overlap_updates=False, **options), count=1)
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, alone[name], rtol=1e-4, atol=1e-5)
