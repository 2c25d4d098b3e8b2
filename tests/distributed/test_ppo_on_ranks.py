"""PPO on one, two and three ranks gives the same losses, gradients, statistics and weights, however models lie."""

from datetime import timedelta
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from builders import tiny_language_model, tiny_tokenizer
from distributed.paths import plain_paths
from distributed.ranks import COLLECTIVE_SECONDS, Ranks, ranks_of
from proximo.config.devices import DevicesConfig
from proximo.config.ppo.options import PPOConfig
from proximo.distributed.sharding import mesh_of
from proximo.distributed.world import current, whole
from proximo.errors import RankError
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions
from proximo.models.scalar import HeadStart
from proximo.models.sharing import value_on_base
from proximo.ppo.trainer import PPOTrainer

NUM_STEPS = 20
PROMPTS = ["ab", "cdefgh", "i", "jkl"]


def config(**options: Any) -> PPOConfig:
    base: dict[str, Any] = {
        "num_steps": NUM_STEPS,
        "prompts_per_step": 4,
        "responses_per_prompt": 2,
        # The last minibatch of an epoch has two responses: fewer than three ranks.
        "minibatch_responses": 3,
        "epochs_per_step": 1,
        "policy_optimizer": {"learning_rate": 1e-3},
        "guards": {"max_skipped_fraction": 1.0},
    }
    return PPOConfig(**(base | options))


GROUPS = {"advantage": {"kind": "group_standardised"}}
EARLY = {"max_gradient_norm": None, "non_finite_gradient": "stop", "in_backward": True}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"tokens_per_microbatch": 14},
    "value_normalised": {"value_loss": {"normalise": "exponential"}},
    "groups": GROUPS,
    "groups together": GROUPS | {"keep_groups_together": True, "minibatch_responses": 4},
    # The last minibatch of a step is one pair, so that a rank has none.
    "pairs": {"policy_loss": {"objective": "online_dpo"}, "kl": {"coefficient": 0.4}, "minibatch_responses": 6},
    # So low a limit takes tokens out in every update but the first of a step.
    "m2po": GROUPS | {"policy_loss": {"objective": {"kind": "m2po", "max_second_moment": 1e-5}}, "epochs_per_step": 2},
    "full_kl": {"kl": {"estimator": "full", "kind": "loss", "coefficient": 0.1}},
    "full_kl_reward": {"kl": {"estimator": "full", "coefficient": 0.1}},
    "follows": {"kl": {"reference_every_steps": 2, "reference_decay": 0.5}, "average_decay": 0.9},
    "in_backward": {
        **{f"{role}_optimizer": {"learning_rate": 1e-3, **EARLY} for role in ("policy", "value")},
    },
    "trunk after warm-up": {"critic_warmup_steps": 2},
    "olmoe": GROUPS,  # transformers has no classifier of it to be a value model
    "guards": {"guards": {"target_kl": 1e-4, "max_skipped_fraction": 1.0}, "epochs_per_step": 2},
}


# Qwen2's has one more expert, which takes every token.
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},
    "olmoe": {"num_experts": 4},
}


def policy_of(name: str, dtype: torch.dtype) -> LanguageModel:
    if name not in EXPERTS:
        return LanguageModel(tiny_language_model(dtype=dtype, seed=3, tie_word_embeddings=name == "tied"))
    balanced = {"output_router_logits": True, "router_aux_loss_coef": 0.5, "num_experts_per_tok": 2}
    plain = tiny_language_model(name, dtype=dtype, seed=3, **(EXPERTS[name] | balanced))
    plain.set_experts_implementation("eager")  # others have no float64
    return LanguageModel(plain)


@plain_paths()
def run_case(name: str, devices: dict[str, Any], num_steps: int, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """The metrics of every step and the weights at the end of one case, on every rank."""
    options, lora, trunk = dict(CASES.get(name, {})), name.startswith("lora"), name.startswith("trunk")
    if name == "ptx":
        options |= {"ptx": {"coefficient": 0.5, "examples_per_update": 2}}
    policy = policy_of(name, dtype)
    if lora:
        policy = policy.with_adapter(LoRAOptions(rank=2, alpha=4.0, seed=1))
    value: Any = "trunk" if trunk else None
    if name == "lora on one base":
        value = value_on_base(policy, LoRAOptions(rank=2, alpha=4.0, seed=2), HeadStart.ZERO)
    if name == "checkpointed layers":
        policy.use_activation_checkpointing()
    trainer = PPOTrainer(
        policy,
        tiny_tokenizer(),
        value=value,
        ptx=["abcabc", "de", "fghi"] if name == "ptx" else None,
        config=config(**options),
        devices=DevicesConfig(**devices),
    )
    lines = []
    for step in range(num_steps):
        random = np.random.default_rng(step)
        responses = [random.integers(6, 60, size=random.integers(1, 9)).tolist() for _ in range(2 * len(PROMPTS))]
        line = trainer.step(PROMPTS, responses, random.normal(size=len(responses)).tolist())
        timed = ("time/", "throughput/", "memory/")
        lines.append({key: value for key, value in line.items() if not key.startswith(timed)})
    weights = {
        f"{worker.role}.{name}": whole(weight).detach().clone()
        for worker in trainer.roles.workers
        for name, weight in worker.model.model.named_parameters()
    }
    return {"lines": lines, "weights": weights}


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> tuple[float, float]:
    """Largest relative difference of a metric, and of a weight."""
    metrics = 0.0
    for line, other in zip(found["lines"], wanted["lines"], strict=True):
        assert line.keys() == other.keys()
        for key, value in other.items():
            metrics = max(metrics, abs(line[key] - value) / max(abs(value), 1e-2))
    weights = [
        float((found["weights"][name] - weight).abs().max() / weight.abs().max().clamp(min=1e-2))
        for name, weight in wanted["weights"].items()
    ]
    return metrics, max(weights)


@cache
def on_one_rank(name: str, num_steps: int) -> dict[str, Any]:
    return run_case(name, {}, num_steps)


def check(ranks: Ranks, name: str, devices: dict[str, Any], num_steps: int) -> None:
    results = ranks.run(run_case, name, devices, num_steps)
    for found in results:
        metrics, weights = differences(found, on_one_rank(name, num_steps))
        assert metrics < 1e-9
        assert weights < 1e-9
        assert found["lines"] == results[0]["lines"]


FULL, GRADS, WHOLE = {"shard": "full"}, {"shard": "grads"}, {"shard": "replicate"}
EACH = {
    "plain": FULL | {"offload": "always"},
    "accumulation": FULL | {"reduce_gradients": "microbatch"},
    "value_normalised": GRADS,
    "groups": WHOLE,
    "groups together": WHOLE,
    "pairs": FULL,
    "m2po": GRADS,
    "ptx": FULL,
    "full_kl": FULL,
    "full_kl_reward": GRADS,
    "follows": FULL,
    "guards": WHOLE,
    "trunk": FULL,
    "lora": FULL,
    "lora on one base": FULL,
    "tied": FULL,
    "checkpointed layers": FULL,
    "in_backward": FULL,
    "trunk after warm-up": FULL,
    "mixtral": FULL,
    "qwen2_moe": WHOLE,
    "olmoe": GRADS,
}
OTHER_WAYS = [("in_backward", GRADS), ("in_backward", WHOLE), ("trunk after warm-up", WHOLE), ("follows", WHOLE)]
"""Cases whose gradients or weights take another way through the code where models lie otherwise."""
IN_EVERY_WAY = [
    FULL,
    GRADS,
    WHOLE,
    FULL | {"offload": "always"},
    FULL | {"offload": "idle"},
    GRADS | {"reduce_gradients": "microbatch"},
]
IDLE = {"follows": FULL, "full_kl": GRADS}
"""Cases whose frozen models lie on the host between their calls."""


def steps_of(name: str) -> int:
    """So many that a reference has followed, and a warm-up is over."""
    return 3 if name in ("follows", "trunk after warm-up") else 2


@pytest.mark.parametrize("name", EACH)
def test_two_ranks_compute_what_one_rank_computes(two: Ranks, name: str) -> None:
    check(two, name, EACH[name], steps_of(name))


@pytest.mark.parametrize(
    ("name", "devices"), OTHER_WAYS, ids=lambda each: each if isinstance(each, str) else each["shard"]
)
def test_two_ranks_compute_the_same_with_models_that_lie_otherwise(
    two: Ranks, name: str, devices: dict[str, Any]
) -> None:
    check(two, name, devices, steps_of(name))


@pytest.mark.parametrize("name", IDLE)
def test_models_that_leave_the_device_between_calls_compute_the_same(two: Ranks, name: str) -> None:
    check(two, name, IDLE[name] | {"offload": "idle"}, steps_of(name))


def test_three_ranks_balance_experts_as_one_rank_does(three: Ranks) -> None:
    """Over all tokens of an update, of which the last of a step has none on one rank."""
    check(three, "mixtral", FULL, 2)
    balanced = [line["policy/balancing_loss"] for line in on_one_rank("mixtral", 2)["lines"]]
    assert all(1.5 < each < 4 for each in balanced)
    assert len(set(balanced)) == 2


@pytest.mark.parametrize("devices", [FULL, WHOLE], ids=lambda devices: devices["shard"])
def test_three_ranks_compute_what_one_rank_computes(three: Ranks, devices: dict[str, Any]) -> None:
    """The last minibatch of each step has two responses, so that one rank has none."""
    check(three, "accumulation", devices, 2)


def test_four_ranks_hold_two_copies_of_which_each_is_shared_by_two() -> None:
    """Hybrid sharding, in which one rank of four has nothing to do in the last minibatch."""
    with ranks_of(4) as four:
        for name in ("accumulation", "in_backward"):
            check(four, name, FULL | {"shard_size": 2}, 2)
        assert four.run(groups_of_two_copies) == [
            [([0, 2], COLLECTIVE_SECONDS), ([0, 1], COLLECTIVE_SECONDS)],
            [([1, 3], COLLECTIVE_SECONDS), ([0, 1], COLLECTIVE_SECONDS)],
            [([0, 2], COLLECTIVE_SECONDS), ([2, 3], COLLECTIVE_SECONDS)],
            [([1, 3], COLLECTIVE_SECONDS), ([2, 3], COLLECTIVE_SECONDS)],
        ]


def groups_of_two_copies() -> list[tuple[list[int], float]]:
    """Ranks and timeout of this rank's groups: those that have the same shard, and those that share a copy."""
    mesh = mesh_of(current(), torch.device("cpu"), shard_size=2)
    return [
        (dist.get_process_group_ranks(group), timeout_of(group).total_seconds())
        for group in (mesh.get_group("replicate"), mesh.get_group("shard"))
    ]


def timeout_of(group: Any) -> timedelta:
    return group._get_backend(torch.device("cpu")).options._timeout


@plain_paths()
def gradients_of_first_update(devices: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Role and parameter -> whole gradient of the first update of one step in float32."""
    policy = LanguageModel(tiny_language_model(seed=3))
    made = config(minibatch_responses=8, tokens_per_microbatch=20)
    trainer = PPOTrainer(policy, tiny_tokenizer(), config=made, devices=DevicesConfig(**devices))
    found: dict[str, torch.Tensor] = {}
    for role, learner in trainer.learners.items():

        def keep(norm: float, role: str = role, learner: Any = learner) -> None:
            for name, parameter in learner.parameters.items():
                found[f"{role}.{name}"] = whole(parameter.grad).clone()

        learner._apply = keep
    trainer.step(["ab", "cdefgh", "i"], [[9, 8, 7], [6, 5], [20, 21, 22, 23, 24, 25, 26]], [1.0, 0.0, 0.5])
    return found


@pytest.mark.parametrize("devices", [GRADS, WHOLE], ids=lambda devices: devices["shard"])
def test_gradients_in_float32_differ_in_rounding_alone(two: Ranks, devices: dict[str, Any]) -> None:
    wanted = gradients_of_first_update({})
    for found in two.run(gradients_of_first_update, devices):
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


@plain_paths()
def flip_one_bit(what: str) -> str:
    """The message of the step in which a number of rank 1 has another last bit."""
    options = {"average_decay": 0.9, "kl": {"reference_every_steps": 1, "reference_decay": 0.5}}
    trainer = PPOTrainer(
        LanguageModel(tiny_language_model()), tiny_tokenizer(), config=config(**options), devices=DevicesConfig(**WHOLE)
    )
    values_of, wrong = trainer.roles.value.values, current().rank == 1
    average, reference = trainer.roles.average, trainer.roles.reference
    move = average.move

    def after_updates(policy: Any) -> None:
        move(policy)
        if wrong and what not in {"a value", "a weight"}:
            moment = next(iter(trainer.learners["value"].optimizer.state.values())).get("exp_avg")
            models = {"the average": average, "the reference": reference}
            flipped = moment if what == "a moment" else next(models[what].model.model.parameters()).data
            flipped.view(torch.int32)[0, 0] ^= 1

    def values(responses: Any) -> Any:
        found = values_of(responses)
        if wrong:
            found.view(torch.int32)[0] ^= 1
        return found

    average.move = after_updates
    if what == "a value":
        trainer.roles.value.values = values
    elif wrong and what == "a weight":
        next(trainer.policy.model.parameters()).data.view(torch.int32)[0, 0] ^= 1
    try:
        trainer.step(["a", "b"], [[9, 8, 7], [6, 5]], [1.0, 0.0])
    except RankError as error:
        return str(error)
    return "nothing"


BITS = {
    "a value": "records: ",
    "a weight": "weights of the policy: ",
    "a moment": "moments of the value: ",
    "the average": "weights of the average: ",
    "the reference": "weights of the reference: ",
}


@pytest.mark.parametrize("what", BITS)
def test_one_other_bit_on_a_rank_is_found_in_that_step(two: Ranks, what: str) -> None:
    """And the message says in which part, and names no other one."""
    for message in two.run(flip_one_bit, what):
        assert f"rank 1 has other numbers than rank 0 ({BITS[what]}" in message
        assert "state: " not in message


@pytest.mark.soak
@pytest.mark.parametrize("devices", IN_EVERY_WAY, ids=str)
@pytest.mark.parametrize("name", EACH)
def test_every_case_lies_on_ranks_in_every_way(two: Ranks, name: str, devices: dict[str, Any]) -> None:
    check(two, name, devices, 20)
