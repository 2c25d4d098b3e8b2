"""A plan for several ranks is that of one of them: its share of memory and work."""

import json
import re

import pytest

from proximo.cli import main
from proximo.cli.recipe_commands import parse_bytes
from proximo.errors import ConfigError
from proximo.plan.profiling import make_plans
from proximo.plan.record import RANK_BYTES
from proximo.ppo.recipe import PPORecipe
from tiny_runs import changed, recipe_of

TRAINED = ("train_policy", "train_value")
ON = {"run.device": "cuda", "model.config.num_hidden_layers": 2}


def plan_of(inputs, num_ranks, changes):
    (plan,) = make_plans(
        PPORecipe.model_validate(changed(recipe_of("ppo", inputs), ON | changes)), device="cuda", num_ranks=num_ranks
    )
    return plan


def phase_of(plan, name):
    return next(phase for phase in plan.phases if phase.name == name)


def test_a_rank_has_its_share_of_weights_moments_and_work(inputs):
    alone, four = plan_of(inputs, 1, {}), plan_of(inputs, 4, {"devices.num": 4})
    assert (alone.num_ranks, four.num_ranks) == (1, 4)
    whole, shared = phase_of(alone, "train_policy"), phase_of(four, "train_policy")
    for part in ("policy weights", "policy optimizer", "reference weights"):
        assert whole.parts_bytes[part] / 4 == pytest.approx(shared.parts_bytes[part], rel=0.02)
    assert shared.tokens_per_step * 4 == whole.tokens_per_step
    assert {"gathered root", "gathered layers", "reduction buffer"} <= set(shared.parts_bytes)
    replicated = plan_of(inputs, 4, {"devices.num": 4, "devices.shard": "replicate"})
    assert phase_of(replicated, "train_policy").parts_bytes["policy weights"] == whole.parts_bytes["policy weights"]


def test_every_key_of_the_section_changes_the_plan(inputs):
    """And in the way that docs/scale.md says: what is on the host is not on the device."""
    small = {"devices.num": 4, "ppo.tokens_per_microbatch": 16, "ppo.minibatch_responses": 8, "ppo.prompts_per_step": 8}
    full = plan_of(inputs, 4, small)
    idle = plan_of(inputs, 4, small | {"devices.offload": "idle"})
    assert "reference weights" not in phase_of(idle, "train_policy").parts_bytes
    assert "reference weights" in phase_of(idle, "reference_logprobs").parts_bytes
    always = plan_of(inputs, 4, small | {"devices.offload": "always"})
    assert not {"policy weights", "policy optimizer"} & set(phase_of(always, "train_policy").parts_bytes)
    assert always.host_bytes > idle.host_bytes > full.host_bytes == 0
    each_time = plan_of(inputs, 4, small | {"devices.reduce_gradients": "microbatch"})
    assert phase_of(each_time, "train_policy").peak < phase_of(full, "train_policy").peak
    hybrid = plan_of(inputs, 4, small | {"devices.shard_size": 2})
    for part in ("policy weights", "policy optimizer"):
        assert (
            phase_of(hybrid, "train_policy").parts_bytes[part] > 1.9 * phase_of(full, "train_policy").parts_bytes[part]
        )
    one_role = plan_of(inputs, 4, small | {"devices.value.shard": "grads"})
    gathered = {
        phase: [phase_of(each, phase).parts_bytes["gathered layers"] for each in (full, one_role)] for phase in TRAINED
    }
    assert gathered["train_policy"][0] == gathered["train_policy"][1]
    assert gathered["train_value"][0] != gathered["train_value"][1]


def test_the_command_takes_ranks_and_memory(inputs, capsys, tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(json.dumps(recipe_of("sft", inputs)))  # YAML
    assert main(["plan", str(path), "--devices", "2", "--memory", "80GiB"]) == 0
    text = capsys.readouterr().out
    assert f"one of 2 ranks: {RANK_BYTES}\n" in text
    assert "of the machine's 81,920 MiB" in text
    assert "memory of the host" not in text
    assert main(["plan", str(path), "--devices", "2", "devices.offload=always"]) == 0
    assert re.search(
        r"one of 2 ranks: .*; beside the device, \S+ MiB in the memory of the host", capsys.readouterr().out
    )
    assert main(["plan", str(path), "--devices", "2", "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)
    assert (plan["num_ranks"], plan["host_bytes"]) == (2, 0)
    assert main(["plan", str(path), "devices.shard_size=3", "--devices", "4"]) == 2
    assert "devices.shard_size (3) must divide" in capsys.readouterr().err
    assert main(["plan", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["num_ranks"] == 1


def test_sizes_have_units():
    assert parse_bytes("80GiB") == 80 * 2**30
    assert parse_bytes("1.5 GB") == 1.5e9
    for wrong in ("80", "0GiB", "0.000000001 MB"):
        with pytest.raises(ConfigError, match="a number above 0 with GiB"):
            parse_bytes(wrong)
