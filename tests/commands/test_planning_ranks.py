"""A plan for several ranks is that of one of them: its share of memory and work, traffic, time, and ways to choose."""

import json
import re

import pytest

from proximo.cli import main
from proximo.cli.planning import parse_bytes, parse_machine
from proximo.errors import ConfigError
from proximo.plan.alternatives import alternatives, compare, fastest
from proximo.plan.machine import MACHINES
from proximo.plan.profiling import make_plans
from proximo.ppo.recipe import PPORecipe
from proximo.supervised.sft.recipe import SFTRecipe
from tiny_runs import LORA, changed, make_inputs, recipe_of

ON = {"run.device": "cuda", "model.config.num_hidden_layers": 2}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def plan_of(place, num_ranks, changes):
    (plan,) = make_plans(
        PPORecipe.model_validate(changed(recipe_of("ppo", place), ON | changes)), device="cuda", num_ranks=num_ranks
    )
    return plan


def phase_of(plan, name):
    return next(phase for phase in plan.phases if phase.name == name)


def test_a_rank_has_its_share_of_weights_moments_and_work(place):
    alone, four = plan_of(place, 1, {}), plan_of(place, 4, {"devices.num": 4})
    assert alone.ranks is None
    assert four.ranks is not None
    assert four.ranks.num == 4
    whole, shared = phase_of(alone, "train_policy"), phase_of(four, "train_policy")
    for part in ("policy weights", "policy optimizer", "reference weights"):
        assert whole.parts[part] / 4 == pytest.approx(shared.parts[part], rel=0.02)
    assert shared.tokens * 4 == whole.tokens
    assert {"gathered root", "gathered layers", "reduction buffer"} <= set(shared.parts)
    replicated = plan_of(place, 4, {"devices.num": 4, "devices.shard": "replicate"})
    assert phase_of(replicated, "train_policy").parts["policy weights"] == whole.parts["policy weights"]
    assert replicated.ranks is not None
    assert set(replicated.ranks.traffic["train_policy"]) == {"all-reduce"}
    assert set(four.ranks.traffic["train_policy"]) == {"all-gather", "reduce-scatter"}
    assert set(four.ranks.traffic["generate"]) == {"all-gather", "records"}


def test_every_key_of_the_section_changes_the_plan(place):
    """And in the way that docs/scale.md says: what is on the host is not on the device."""
    small = {"devices.num": 4, "ppo.tokens_per_microbatch": 16, "ppo.minibatch_responses": 8, "ppo.prompts_per_step": 8}
    full = plan_of(place, 4, small)
    idle = plan_of(place, 4, small | {"devices.offload": "idle"})
    assert "reference weights" not in phase_of(idle, "train_policy").parts
    assert "reference weights" in phase_of(idle, "reference_logprobs").parts
    always = plan_of(place, 4, small | {"devices.offload": "always"})
    assert not {"policy weights", "policy optimizer"} & set(phase_of(always, "train_policy").parts)
    assert always.ranks is not None
    assert full.ranks is not None
    assert idle.ranks is not None
    assert always.ranks.host > idle.ranks.host > full.ranks.host == 0
    each_time = plan_of(place, 4, small | {"devices.reduce_gradients": "microbatch"})
    assert each_time.ranks is not None
    first, second = (each.ranks.traffic["train_policy"]["reduce-scatter"] for each in (full, each_time))
    assert second == 2 * first
    assert phase_of(each_time, "train_policy").peak < phase_of(full, "train_policy").peak
    hybrid = plan_of(place, 4, small | {"devices.shard_size": 2})
    assert hybrid.ranks is not None
    assert set(hybrid.ranks.collectives["train_policy"]) == {"all-gather", "reduce-scatter", "all-reduce"}
    one_role = plan_of(place, 4, small | {"devices.value.shard": "grads"})
    assert one_role.ranks is not None
    assert one_role.ranks.traffic["train_policy"] == full.ranks.traffic["train_policy"]
    assert one_role.ranks.traffic["train_value"]["all-gather"] < full.ranks.traffic["train_value"]["all-gather"]


def test_a_head_on_the_trunk_and_adapters_have_no_traffic_of_a_second_model(place):
    trunk = {"value": {"init_from": "trunk"}, "ppo.value_optimizer": {"learning_rate": 1e-5}}
    plan = plan_of(place, 2, trunk | {"devices.num": 2})
    alone = plan_of(place, 2, {"devices.num": 2})
    assert plan.ranks is not None
    assert alone.ranks is not None
    joint = plan.ranks.traffic["train_policy_and_value"]["all-gather"]
    assert joint == pytest.approx(alone.ranks.traffic["train_policy"]["all-gather"], rel=0.05)
    adapted = plan_of(
        place,
        2,
        {"devices.num": 2, "model.lora": LORA, "model.config": None, "model.path": str(place / "language_model")},
    )
    assert adapted.ranks is not None
    traffic = adapted.ranks.traffic["train_policy"]
    assert traffic["reduce-scatter"] < traffic["all-gather"] / 3, "only the adapter has gradients"


def test_ways_are_compared_and_the_fastest_that_fits_is_named(place):
    recipe = SFTRecipe.model_validate(changed(recipe_of("sft", place), {"run.device": "cuda"}))
    found = alternatives(recipe, device="cuda", num_ranks=16, machine=MACHINES["cuda"])
    assert [each.seconds for each in found] == sorted(each.seconds for each in found)
    names = [each.settings for each in found]
    assert "devices.shard=full devices.offload=none devices.shard_size=8" in names
    assert "devices.shard=replicate devices.offload=always" not in names
    least = min(each.peak for each in found)
    assert fastest(found, least - 1) is None
    assert fastest(found, 2**40) is found[0]
    text = compare(found, memory=least, machine=MACHINES["cuda"])
    assert "fastest that fits" in text
    assert text.count(" yes") == sum(each.peak <= least for each in found)
    assert "none fits" in compare(found, memory=1, machine=MACHINES["cuda"])


def test_the_command_takes_ranks_memory_and_a_machine(place, capsys, tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(json.dumps(recipe_of("sft", place)))  # YAML
    assert main(["plan", str(path), "--devices", "2", "--memory", "80GiB", "--machine", "tflops=100"]) == 0
    text = capsys.readouterr().out
    for piece in ("one of 2 ranks", "reduce-scatter", "fastest that fits in 80 GiB", "times are for 100 TFLOP/s"):
        assert piece in text
    assert "memory of the host" not in text
    assert main(["plan", str(path), "--devices", "2", "devices.offload=always"]) == 0
    assert re.search(r"one of 2 ranks; beside the device, \S+ GiB in the memory of the host", capsys.readouterr().out)
    assert main(["plan", str(path), "--devices", "2", "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)
    assert plan["ranks"]["num"] == 2
    assert plan["ranks"]["phases"]["train"]["collectives"]["all-gather"] > 0
    assert main(["plan", str(path), "devices.shard_size=3", "--devices", "4"]) == 2
    assert "devices.shard_size (3) must divide" in capsys.readouterr().err
    assert main(["plan", str(path), "--json"]) == 0
    assert "ranks" not in json.loads(capsys.readouterr().out)[0]


def test_sizes_and_machines_have_units():
    assert parse_bytes("80GiB") == 80 * 2**30
    assert parse_bytes("1.5 GB") == 1.5e9
    for wrong in ("80", "0GiB", "0.000000001 MB"):
        with pytest.raises(ConfigError, match="a number above 0 with GiB"):
            parse_bytes(wrong)
    machine = parse_machine("tflops=2,devices=4,between=0.5", MACHINES["cuda"])
    assert (machine.flops, machine.devices, machine.between) == (2e12, 4, 0.5e9)
    assert machine.inside == MACHINES["cuda"].inside
    for wrong in ("speed=1", "tflops=0", "devices=0.5"):
        with pytest.raises(ConfigError, match="--machine takes tflops"):
            parse_machine(wrong, MACHINES["cuda"])
