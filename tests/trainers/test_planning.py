"""A plan follows its recipe: the models of the run, and every setting that costs memory or work."""

import json

import pytest

from proximo.cli import main
from proximo.config.recipes import PipelineRecipe, PPORecipe, RewardRecipe, SFTRecipe
from proximo.errors import ModelError
from proximo.trainers.planning.stages import make_plans
from proximo.trainers.planning.text import advice, describe
from proximo.trainers.ppo_run import build_task
from tiny_runs import changed, make_inputs, recipe_of

SCHEMAS = {"sft": SFTRecipe, "reward": RewardRecipe, "ppo": PPORecipe}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def plan_of(kind, place, changes=None):
    (plan,) = make_plans(SCHEMAS[kind].model_validate(changed(recipe_of(kind, place), changes or {})))
    return plan


@pytest.fixture(scope="module")
def plain(place):
    return {kind: plan_of(kind, place) for kind in SCHEMAS}


def test_parameters_are_those_of_the_models_that_a_run_builds(place, plain):
    trainer = build_task(PPORecipe.model_validate(recipe_of("ppo", place))).ppo
    built = {"policy": trainer.roles.policy, "reference": trainer.roles.reference, "value": trainer.roles.value}
    planned = {role.name: role for role in plain["ppo"].roles}
    for name, model in built.items():
        assert planned[name].parameters == sum(p.numel() for p in model.model.parameters())
        assert planned[name].trained == sum(p.numel() for p in model.model.parameters() if p.requires_grad)
    phases = {phase.name: phase.parts for phase in plain["ppo"].phases}
    for role in ("policy", "value"):
        states = trainer.learners[role].parameters.values()
        assert phases["generate"][f"{role} optimizer"] == sum(8 * p.numel() + 4 for p in states)
    assert list(phases) == ["generate", "score", "reference_logprobs", "values", "train_policy", "train_value"]


MORE = [
    ("ppo", {"ppo.tokens_per_microbatch": 64}, "train_policy"),
    ("ppo", {"ppo.rollout.max_new_tokens": 40}, "train_policy"),
    ("ppo", {"data.max_prompt_tokens": 24}, "generate"),
    ("ppo", {"ppo.prompts_per_step": 8, "ppo.rollout.max_rows": 8}, "generate"),
    ("ppo", {"ppo.average_decay": 0.9}, "score"),
    ("ppo", {"tokenizer.added_tokens": ["<a>", "<b>"]}, "generate"),
    ("ppo", {"policy.config.hidden_size": 32}, "generate"),
    ("ppo", {"ppo.kl": {"measure": "full"}}, "reference_logprobs"),
    ("ppo", {"ppo.kl": {"place": "loss", "measure": "full"}}, "train_policy"),
    ("ppo", {"ppo.policy_loss.entropy_coefficient": 0.1}, "train_policy"),
    ("sft", {"data.max_tokens": 60}, "train"),
    ("sft", {"sft.tokens_per_microbatch": 200}, "train"),
    ("reward", {"reward.tokens_per_microbatch": 400}, "train"),
    ("sft", {"model.config.num_hidden_layers": 2}, "train"),
]
LESS = [
    ("ppo", {"policy.lora": {"rank": 2}}, "train_value"),
    ("ppo", {"ppo.kl.place": "none", "ppo.kl.target": None}, "generate"),
    ("ppo", {"ppo.advantage": "group_centred", "ppo.responses_per_prompt": 2, "ppo.prompts_per_step": 2}, "score"),
    ("ppo", {"policy.config.num_hidden_layers": 2, "policy.frozen_layers": 1}, "train_policy"),
    ("ppo", {"policy.config.num_hidden_layers": 4, "policy.activation_checkpointing": True}, "train_policy"),
    ("ppo", {"value.activation_checkpointing": True, "value.start": "policy"}, "train_value"),
    ("ppo", {"ppo.rollout.max_rows": 2}, "generate"),
    ("ppo", {"ppo.minibatch_responses": 1}, "train_policy"),
    ("reward", {"reward.pairs_per_step": 1}, "train"),
    ("sft", {"sft.examples_per_step": 1, "sft.tokens_per_microbatch": 40}, "train"),
]


def peak_of(plan, phase):
    return next(each.peak for each in plan.phases if each.name == phase)


@pytest.mark.parametrize(("kind", "changes", "phase"), MORE)
def test_what_costs_memory_is_seen(place, plain, kind, changes, phase):
    assert peak_of(plan_of(kind, place, changes), phase) > peak_of(plain[kind], phase)


@pytest.mark.parametrize(("kind", "changes", "phase"), LESS)
def test_what_saves_memory_is_seen(place, plain, kind, changes, phase):
    base = plain[kind]
    layers = {key: value for key, value in changes.items() if key == "policy.config.num_hidden_layers"}
    if layers:
        base = plan_of(kind, place, layers)
    assert peak_of(plan_of(kind, place, changes), phase) < peak_of(base, phase)


def test_dropout_is_kept_where_it_is_asked_for(place):
    gpt2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
    off, on = (plan_of("sft", place, {"model.config": gpt2, "sft.dropout": asked}) for asked in (False, True))
    assert on.peak > off.peak


def test_bf16_keeps_a_copy_for_the_rollout_and_computes_the_old_logprobs(place):
    plan = plan_of("ppo", place, {"run.precision": "bf16"})
    phases = {phase.name: phase.parts for phase in plan.phases}
    assert phases["generate"]["bf16 copy"] > 0
    assert "policy_logprobs" in phases


def test_epochs_are_work_and_not_memory(place, plain):
    twice = plan_of("ppo", place, {"ppo.epochs_per_step": 2})
    work = {phase.name: (phase.tokens, phase.flops) for phase in twice.phases}
    for phase in plain["ppo"].phases:
        factor = 2 if phase.name.startswith("train") else 1
        assert work[phase.name] == (factor * phase.tokens, factor * phase.flops)
    assert twice.peak == plain["ppo"].peak


def test_the_process_and_its_allocator_are_counted_on_a_cpu_only(place):
    recipe = SFTRecipe.model_validate(recipe_of("sft", place))
    (here,), (there,) = make_plans(recipe), make_plans(recipe, device="cuda")
    assert set(here.largest.parts) - set(there.largest.parts) == {"process", "allocator"}


def test_stages_of_a_pipeline_start_from_what_those_before_make(place):
    sft, reward, ppo = (recipe_of(kind, place) for kind in SCHEMAS)
    for stage in (sft, reward, ppo):
        del stage["run"]
    reward["model"], ppo["policy"] = {"path": "@sft"}, {"path": "@sft"}
    ppo["reward"][0]["path"] = "@reward"
    whole = {"run": {"folder": str(place / "pipe")}, "sft": sft, "reward": reward, "ppo": ppo}
    plans = make_plans(PipelineRecipe.model_validate(whole))
    assert [plan.stage for plan in plans] == ["sft", "reward", "ppo"]
    roles = {role.name: role.parameters for role in plans[2].roles}
    assert roles["policy"] == plans[0].roles[0].parameters
    assert roles["reward_model"] == roles["value"] == plans[1].roles[0].parameters


def test_a_hub_name_that_cannot_be_reached_asks_for_a_local_folder(place):
    with pytest.raises(ModelError, match=r"nobody/nothing.*give the path of a local folder"):
        plan_of("sft", place, {"model": {"path": "nobody/nothing"}})


def test_the_advice_names_the_keys_of_the_largest_part(place, plain):
    assert "ppo.tokens_per_microbatch" in advice(plan_of("ppo", place, {"ppo.tokens_per_microbatch": 4000}))
    text = describe(plain["sft"], memory=10 * 2**20)
    assert "more than the machine has; " in text
    assert "more than the machine has" not in describe(plain["sft"], memory=2**40)


def test_the_command_prints_a_table_or_json(place, capsys, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(json.dumps(recipe_of("ppo", place)))  # YAML
    assert main(["plan", str(recipe), "ppo.rollout.max_rows=2", "--measure"]) == 0
    text = capsys.readouterr().out
    for piece in ("policy optimizer", "train_policy", "TFLOP", "peak", "at least"):
        assert piece in text
    assert main(["plan", str(recipe), "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)
    assert plan["peak_bytes"] == sum(plan["phases"][plan["peak_phase"]]["parts_bytes"].values())
    assert not (place / "run").exists()
