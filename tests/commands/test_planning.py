"""A plan follows its recipe: the models of the run, and every setting that costs memory or work."""

import importlib.util
import json

import pytest
import torch
from torch import nn

from proximo.cli import main
from proximo.commands.pipeline.recipe import PipelineRecipe
from proximo.config.run import OptimizerConfig
from proximo.errors import ConfigError, ModelError
from proximo.learner.optimizers import OptimizerOptions, make_optimizer
from proximo.plan.profiling import make_plans
from proximo.plan.rank_memory import optimizer_bytes
from proximo.plan.record import advice, describe
from proximo.ppo import from_recipe
from proximo.ppo import plan as ppo_plan
from proximo.ppo.recipe import PPORecipe
from proximo.supervised import dpo_trainer as dpo
from proximo.supervised import kto_trainer as kto
from proximo.supervised.dpo_recipe import DPORecipe
from proximo.supervised.kto_recipe import KTORecipe
from proximo.supervised.reward_recipe import RewardRecipe
from proximo.supervised.sft_recipe import SFTRecipe
from tiny_runs import LORA, changed, recipe_of

SCHEMAS = {"sft": SFTRecipe, "reward": RewardRecipe, "dpo": DPORecipe, "kto": KTORecipe, "ppo": PPORecipe}
LONG = {"ppo.rollout.max_new_tokens": 40}
SLOW = {"learning_rate": 1e-5}
EARLY = {"learning_rate": 1e-3, "in_backward": True, "max_gradient_norm": None, "non_finite_gradient": "stop"}


def plan_of(kind, inputs, changes=None, *, only=()):
    """`only`: names of the calls of PPO that are profiled; empty for all."""
    with pytest.MonkeyPatch.context() as patch:
        if only:
            given = ppo_plan.trace_step
            patch.setattr(
                ppo_plan, "trace_step", lambda *a, **k: [each for each in given(*a, **k) if each.name in only]
            )
        (plan,) = make_plans(SCHEMAS[kind].model_validate(changed(recipe_of(kind, inputs), changes or {})))
    return plan


def phase_of(plan, name):
    return next(phase for phase in plan.phases if phase.name == name)


@pytest.fixture(scope="module")
def plain(inputs):
    return {kind: plan_of(kind, inputs) for kind in SCHEMAS} | {"long": plan_of("ppo", inputs, LONG)}


SHARED_BASE = {"model.lora": LORA, "reward.0.share_base": True}
BUILT = {
    "dpo": ("dpo", {}),
    "dpo of an adapter": ("dpo", {"model.lora": LORA}),
    "kto": ("kto", {}),
    "ppo": ("ppo", {}),
    "a head on the policy's trunk": ("ppo", {"value": {"init_from": "trunk"}, "ppo.value_optimizer": SLOW}),
    "a head that warms up on an adapter": (
        "ppo",
        {"value": {"init_from": "trunk"}, "model.lora": LORA, "ppo.critic_warmup_steps": 1},
    ),
    "a reference that shares frozen layers": (
        "ppo",
        {"model.config.num_hidden_layers": 2, "model.frozen_layers": 1, "value": {"init_from": "reward"}},
    ),
    "four roles on one base": ("ppo", SHARED_BASE | {"value": {"init_from": "policy", "lora": LORA}}),
    "a value model from a reward model on the base": ("ppo", SHARED_BASE | {"value": {"init_from": "reward"}}),
}


@pytest.mark.parametrize("name", list(BUILT))
def test_parameters_and_bytes_are_those_that_a_run_builds(inputs, name):
    kind, changes = BUILT[name]
    recipe = SCHEMAS[kind].model_validate(changed(recipe_of(kind, inputs), changes))
    plan = plan_of(kind, inputs, changes, only=("generate",))
    if kind != "ppo":
        task = {"dpo": dpo, "kto": kto}[kind].build_task(recipe)
        models, learners = {"policy": task.model, "reference": task.reference}, task.learners
    else:
        task = from_recipe.build_task(recipe)
        roles, learners = task.ppo.roles, task.ppo.learners
        scorer = task.reward.sources[0][1].model
        models = {each.role: each.model for each in roles.workers} | {"reward_model": scorer}
    held, seen = {}, set()
    for planned, (role, model) in zip(plan.roles, models.items(), strict=True):
        parameters = list(model.model.parameters())
        fresh = [p for p in parameters if p.data_ptr() not in seen]
        assert (planned.name, planned.parameters) == (role, sum(p.numel() for p in parameters))
        assert planned.shared_parameters == planned.parameters - sum(p.numel() for p in fresh)
        assert planned.trained_parameters == sum(p.numel() for p in fresh if p.requires_grad)
        tensors = {t.data_ptr(): t for t in (*parameters, *model.model.buffers()) if t.data_ptr() not in seen}
        held[f"{role} weights"] = sum(t.untyped_storage().nbytes() for t in tensors.values())
        seen |= set(tensors)
    for role, learner in learners.items():
        for parameter in learner.parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        learner.optimizer.step()
        state = [t for s in learner.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        held[f"{role} optimizer"] = sum(t.untyped_storage().nbytes() for t in state)
    found = {part: size for part, size in plan.phases[0].parts_bytes.items() if part.endswith(("weights", "optimizer"))}
    assert found == {part: size for part, size in held.items() if size}


def test_the_phases_of_a_step_are_its_calls(inputs, plain):
    names = ["generate", "score", "reference_logprobs", "values", "train_policy", "train_value"]
    assert [phase.name for phase in plain["ppo"].phases] == names
    joint = plan_of(
        "ppo", inputs, {"value": {"init_from": "trunk"}, "ppo.value_optimizer": SLOW, "run.precision": "bf16"}
    )
    names = ["generate", "score", "policy_logprobs_and_values", "reference_logprobs", "train_policy_and_value"]
    assert [phase.name for phase in joint.phases] == names


def test_sampling_ahead_takes_a_copy_of_the_trained_weights_and_a_pass_for_log_probs(inputs):
    plan = plan_of("ppo", inputs, {"ppo.rollout.staleness": 2})
    parts = plan.phases[0].parts_bytes
    assert parts["sampler weights"] == parts["policy weights"] > 0
    assert "policy_logprobs" in [phase.name for phase in plan.phases]
    assert any("beside the rest of earlier steps" in note for note in plan.notes)
    adapter = plan_of("ppo", inputs, {"ppo.rollout.staleness": 2, "model.lora": LORA}, only=("generate",))
    sampler = next(role for role in adapter.roles if role.name == "sampler")
    assert 0 < sampler.parameters - sampler.shared_parameters < sampler.parameters / 4, "the base is the policy's"


def test_sampling_ahead_takes_its_memory_beside_every_other_call(inputs, plain):
    def own(phase) -> int:
        shared = ("weights", "optimizer", "process", "allocator")
        return sum(size for part, size in phase.parts_bytes.items() if not part.endswith(shared))

    alone = {phase.name: own(phase) for phase in plain["ppo"].phases}
    beside = {phase.name: own(phase) for phase in plan_of("ppo", inputs, {"ppo.rollout.staleness": 2}).phases}
    for call in ("values", "train_policy"):
        assert beside[call] == alone["generate"] + alone[call]


def test_moments_of_8_bits_have_scales_and_small_tensors_keep_float32(inputs):
    """9,000 numbers are 36 blocks; 90 are too few."""
    options = OptimizerConfig(learning_rate=1e-3, kind="adamw_8bit")
    assert optimizer_bytes([nn.Linear(100, 90)], options) == 2 * (9000 + 36 * 4) + 2 * 90 * 4
    assert optimizer_bytes([nn.Linear(100, 90)], options.model_copy(update={"kind": "adamw"})) == 8 * 9090 + 2 * 4
    plan = plan_of("sft", inputs, {"sft.optimizer.kind": "adamw_paged_8bit"})
    assert any("may move them to the host" in note for note in plan.notes)


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_moments_of_8_bits_are_those_of_bitsandbytes():
    layer = nn.Linear(100, 90)
    optimizer = make_optimizer(dict(layer.named_parameters()), OptimizerOptions(learning_rate=1e-3, kind="adamw_8bit"))
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    tensors = [t for s in optimizer.state.values() for n, t in s.items() if torch.is_tensor(t) and "qmap" not in n]
    options = OptimizerConfig(learning_rate=1e-3, kind="adamw_8bit")
    assert optimizer_bytes([layer], options) == sum(t.untyped_storage().nbytes() for t in tensors)


def test_an_optimizer_in_the_backward_holds_no_whole_gradient(inputs):
    whole = {"sft.examples_per_step": 1, "data.max_tokens": 4, "model.config.num_hidden_layers": 4}
    late, early = (plan_of("sft", inputs, whole | extra) for extra in ({}, {"sft.optimizer": EARLY}))
    trained = 4 * late.roles[0].trained_parameters
    assert late.largest.parts_bytes["gradients"] > 0.8 * trained
    assert early.largest.parts_bytes.get("gradients", 0) < trained / 4
    assert early.peak < late.peak - trained / 2


def test_texts_in_the_updates_are_work_and_memory_of_the_policy(inputs, plain):
    texts = {"sources": [{"path": str(inputs / "texts.jsonl")}], "max_tokens": 48}
    with_texts = {"ptx_data": texts, "ppo.ptx": {"coefficient": 0.5, "examples_per_update": 3}}
    plan, two_updates = plan_of("ppo", inputs, with_texts, only=("train_policy", "train_value")), 2
    assert (
        phase_of(plan, "train_policy").tokens_per_step
        == phase_of(plain["ppo"], "train_policy").tokens_per_step + two_updates * 3 * 48
    )
    assert phase_of(plan, "train_policy").peak > phase_of(plain["ppo"], "train_policy").peak
    assert phase_of(plan, "train_value") == phase_of(plain["ppo"], "train_value")


def test_m2po_reads_each_minibatch_once_more(inputs, plain):
    marked = phase_of(
        plan_of("ppo", inputs, {"ppo.policy_loss": {"objective": "m2po"}}, only=("train_policy",)), "train_policy"
    )
    usual, reading = phase_of(plain["ppo"], "train_policy"), phase_of(plain["ppo"], "reference_logprobs")
    assert (marked.tokens_per_step, marked.flops_per_step) == (
        usual.tokens_per_step + reading.tokens_per_step,
        usual.flops_per_step + reading.flops_per_step,
    )
    assert marked.peak == usual.peak


def test_best_of_n_samples_and_scores_more_than_it_trains_on(inputs, plain):
    plan = plan_of("ppo", inputs, {"ppo.samples_per_prompt": 4}, only=("generate", "score", "train_policy"))
    assert phase_of(plan, "generate").tokens_per_step == 4 * 12 + 4 * 4 * 4  # prompts, and sampled responses
    # Samples of one prompt share all of it but its last token.
    assert phase_of(plan, "score").tokens_per_step == 4 * 11 + 4 * 4 * (1 + 4)
    assert phase_of(plan, "train_policy") == phase_of(plain["ppo"], "train_policy")


def test_reference_answers_are_scored_too(inputs, plain):
    plan = plan_of("ppo", inputs, {"ppo.score.minus_reference_answer": True}, only=("score",))
    assert phase_of(plan, "score").tokens_per_step == 2 * phase_of(plain["ppo"], "score").tokens_per_step


def test_what_cannot_be_planned_is_refused_and_what_is_left_out_is_said(inputs):
    with pytest.raises(ConfigError, match=r"no plan for model.quantisation 4bit: .*plan with model.quantisation=none"):
        plan_of("sft", inputs, {"model.lora": LORA, "model.quantisation": "4bit"})
    with pytest.raises(ModelError, match="a olmoe model cannot carry a scalar head: transformers has no sequence-cl"):
        plan_of("reward", inputs, {"model.config.model_type": "olmoe"})
    plan = plan_of("sft", inputs, {"run.compile": "aot_eager"})
    assert "note: run.compile aot_eager is left out" in describe(plan, memory=None)


AGAIN = ("model.activation_checkpointing", "value.activation_checkpointing")
MORE = [
    ("ppo", {"ppo.tokens_per_microbatch": 64}, "train_policy"),
    ("ppo", LONG, "train_policy"),
    ("ppo", {"data.max_prompt_tokens": 24}, "generate"),
    ("ppo", {"ppo.prompts_per_step": 8, "ppo.rollout.max_num_seqs": 8}, "generate"),
    ("ppo", {"ppo.average_decay": 0.9}, "score"),
    ("ppo", {"tokenizer.added_tokens": ["<a>", "<b>"]}, "generate"),
    ("ppo", {"model.config.hidden_size": 32}, "generate"),
    ("ppo", LONG | {"ppo.kl": {"estimator": "full"}}, "reference_logprobs"),
    ("ppo", {"ppo.kl": {"kind": "loss", "estimator": "full"}}, "train_policy"),
    ("ppo", LONG | {"ppo.policy_loss.entropy_coefficient": 0.1}, "train_policy"),
    ("sft", {"data.max_tokens": 60}, "train"),
    ("sft", {"sft.tokens_per_microbatch": 200}, "train"),
    ("reward", {"reward.tokens_per_microbatch": 400}, "train"),
    ("dpo", {"data.max_tokens": 60}, "train"),
    ("kto", {"data.max_tokens": 60}, "train"),
    ("sft", {"model.config.num_hidden_layers": 2}, "train"),
]
LESS = [
    ("ppo", {"model.lora": {"rank": 2}}, "train_value"),
    ("ppo", {"ppo.kl": "none"}, "generate"),
    ("ppo", {"ppo.advantage": "group_centred", "ppo.responses_per_prompt": 2, "ppo.prompts_per_step": 2}, "score"),
    ("ppo", {"ppo.rollout.max_num_seqs": 2}, "generate"),
    ("ppo", {"ppo.minibatch_responses": 1}, "train_policy"),
    ("reward", {"reward.pairs_per_step": 1}, "train"),
    ("sft", {"sft.examples_per_step": 1, "sft.tokens_per_microbatch": 40}, "train"),
]


@pytest.mark.parametrize(("kind", "changes", "phase"), MORE)
def test_what_costs_memory_is_seen(inputs, plain, kind, changes, phase):
    base = plain["long"] if changes.keys() > LONG.keys() else plain[kind]
    plan = plain["long"] if changes == LONG else plan_of(kind, inputs, changes, only=(phase,))
    assert phase_of(plan, phase).peak > phase_of(base, phase).peak


@pytest.mark.parametrize(("kind", "changes", "phase"), LESS)
def test_what_saves_memory_is_seen(inputs, plain, kind, changes, phase):
    assert phase_of(plan_of(kind, inputs, changes, only=(phase,)), phase).peak < phase_of(plain[kind], phase).peak


def test_layers_that_are_frozen_or_computed_again_save_memory_of_their_own_model(inputs):
    deep = {"model.config.num_hidden_layers": 3, "value.init_from": "policy"}
    changes, calls = ({}, {"model.frozen_layers": 1}, dict.fromkeys(AGAIN, True)), ("train_policy", "train_value")
    base, frozen, again = (plan_of("ppo", inputs, deep | each, only=calls) for each in changes)
    assert phase_of(frozen, "train_policy").peak < phase_of(base, "train_policy").peak
    for phase in calls:
        assert phase_of(again, phase).peak < phase_of(base, phase).peak


def test_dropout_is_kept_where_it_is_asked_for(inputs):
    gpt2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
    off, on = (plan_of("sft", inputs, {"model.config": gpt2, "sft.dropout": asked}) for asked in (False, True))
    assert on.peak > off.peak


def test_bf16_keeps_a_copy_for_the_rollout_and_computes_the_old_logprobs(inputs):
    plan = plan_of("ppo", inputs, {"run.precision": "bf16"}, only=("generate", "policy_logprobs"))
    phases = {phase.name: phase.parts_bytes for phase in plan.phases}
    assert phases["generate"]["bf16 copy"] > 0
    assert "policy_logprobs" in phases


def test_training_takes_18_bytes_a_parameter_in_bf16_and_12_with_an_optimizer_in_the_backward_pass(inputs):
    """Weights, two moments, gradients and bf16 copies, beside the activations of one short text."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 8}
    large = {f"model.config.{name}": size for name, size in (sizes | {"num_key_value_heads": 8}).items()}
    large |= {"run.precision": "bf16", "sft.examples_per_step": 1, "sft.tokens_per_microbatch": 48}
    found = []
    for optimizer in (SLOW, EARLY):
        (plan,) = make_plans(
            SFTRecipe.model_validate(changed(recipe_of("sft", inputs), large | {"sft.optimizer": optimizer})),
            device="cuda",
        )
        found.append(plan.peak / plan.roles[0].trained_parameters)
    assert found[0] == pytest.approx(18, abs=0.3)
    assert 12 < found[1] < 12.7, found


def test_the_kl_term_of_kto_is_another_reading_by_both_models(inputs, plain):
    phases = {phase.name: phase for phase in plain["kto"].phases}
    assert list(phases) == ["reference_logprobs", "policy_logprobs", "train"]
    tokens = phases["train"].tokens_per_step
    assert (phases["policy_logprobs"].tokens_per_step, phases["reference_logprobs"].tokens_per_step) == (
        tokens,
        2 * tokens,
    )
    assert phases["reference_logprobs"].flops_per_step == pytest.approx(
        2 * phases["policy_logprobs"].flops_per_step, rel=1e-3
    )
    without = {phase.name: phase for phase in plan_of("kto", inputs, {"kto.reference_point": "zero"}).phases}
    assert list(without) == ["reference_logprobs", "train"]
    assert without["reference_logprobs"].tokens_per_step == without["train"].tokens_per_step == tokens


def test_epochs_are_work_and_not_memory(inputs, plain):
    twice = plan_of("ppo", inputs, {"ppo.epochs_per_step": 2})
    work = {phase.name: (phase.tokens_per_step, phase.flops_per_step) for phase in twice.phases}
    for phase in plain["ppo"].phases:
        factor = 2 if phase.name.startswith("train") else 1
        assert work[phase.name] == (factor * phase.tokens_per_step, factor * phase.flops_per_step)
    assert twice.peak == plain["ppo"].peak


def test_the_process_and_its_allocator_are_counted_on_a_cpu_only(inputs):
    recipe = SFTRecipe.model_validate(recipe_of("sft", inputs))
    (here,), (there,) = make_plans(recipe), make_plans(recipe, device="cuda")
    assert set(here.largest.parts_bytes) - set(there.largest.parts_bytes) == {"process", "allocator"}


def test_stages_of_a_pipeline_start_from_what_those_before_make(inputs):
    sft, reward, ppo = (recipe_of(kind, inputs) for kind in ("sft", "reward", "ppo"))
    for stage in (sft, reward, ppo):
        del stage["run"]
    reward["model"], ppo["model"] = {"path": "@sft"}, {"path": "@sft"}
    ppo["reward"][0]["path"] = "@reward"
    whole = {"run": {"folder": str(inputs / "pipe")}, "sft": sft, "reward": reward, "ppo": ppo}
    plans = make_plans(PipelineRecipe.model_validate(whole))
    assert [plan.stage for plan in plans] == ["sft", "reward", "ppo"]
    roles = {role.name: role.parameters for role in plans[2].roles}
    assert roles["policy"] == plans[0].roles[0].parameters
    assert roles["reward_model"] == roles["value"] == plans[1].roles[0].parameters


def test_a_reward_stage_makes_an_adapter_on_the_base_that_its_ppo_stage_shares(inputs):
    base = {"path": str(inputs / "language_model"), "lora": LORA}
    reward, ppo = recipe_of("reward", inputs), changed(recipe_of("ppo", inputs), {"reward.0.share_base": True})
    reward["model"], ppo["model"], ppo["reward"][0]["path"] = base, base, "@reward"
    for stage in (reward, ppo):
        del stage["run"]
    whole = {"run": {"folder": str(inputs / "shared")}, "reward": reward, "ppo": ppo}
    of_reward, of_ppo = make_plans(PipelineRecipe.model_validate(whole))
    roles = {role.name: role for role in of_ppo.roles}
    for name in ("reward_model", "value"):
        assert roles[name].parameters == of_reward.roles[0].parameters
        head = of_reward.roles[0].trained_parameters + 16  # and one to start
        assert roles[name].shared_parameters == of_reward.roles[0].parameters - head


def test_a_hub_name_that_cannot_be_reached_asks_for_a_local_folder(inputs):
    with pytest.raises(ModelError, match=r"nobody/nothing.*give the path of a local folder"):
        plan_of("sft", inputs, {"model": {"path": "nobody/nothing"}})


def test_the_advice_names_the_keys_of_the_largest_part(inputs, plain):
    much = {"ppo.tokens_per_microbatch": 4000, "ppo.rollout.max_new_tokens": 40}
    assert "ppo.tokens_per_microbatch" in advice(plan_of("ppo", inputs, much, only=("train_policy",)))
    text = describe(plain["sft"], memory=10 * 2**20)
    assert "more than the machine has; " in text
    assert "more than the machine has" not in describe(plain["sft"], memory=2**40)


def test_the_command_prints_a_table_or_json(inputs, capsys, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(json.dumps(recipe_of("ppo", inputs)))  # YAML
    assert main(["plan", str(recipe), "ppo.rollout.max_num_seqs=2"]) == 0
    text = capsys.readouterr().out
    for piece in ("policy optimizer", "train_policy", "TFLOP", "peak", "of the process with its libraries"):
        assert piece in text
    assert main(["plan", str(recipe), "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)
    assert plan["process_bytes"] > 50 * 2**20, "torch alone takes more"
    (largest,) = (phase for phase in plan["phases"] if phase["name"] == plan["peak_phase"])
    assert plan["peak_bytes"] == largest["peak_bytes"] == sum(largest["parts_bytes"].values())
    assert not (inputs / "run").exists()


@pytest.mark.parametrize("asked", [{"model.config.output_router_logits": True}, {"model.balancing_coefficient": 0.1}])
def test_all_experts_are_held_and_each_token_is_counted_for_those_that_it_takes(inputs, plain, asked):
    mixture = {"model.config.model_type": "mixtral", "model.config.num_local_experts": 8}
    one, two = (plan_of("sft", inputs, mixture | {"model.config.num_experts_per_tok": k}) for k in (1, 2))
    assert one.roles == two.roles
    expert, router = 3 * 16 * 32, 8 * 16  # of one layer, width 16 and inner width 32
    assert one.roles[0].parameters == plain["sft"].roles[0].parameters + 7 * expert + router
    tokens = phase_of(one, "train").tokens_per_step
    assert phase_of(two, "train").flops_per_step - phase_of(one, "train").flops_per_step == 6 * tokens * expert
    assert "experts" not in describe(one, memory=None)
    assert "note: what balances the experts (policy) is left out" in describe(
        plan_of("sft", inputs, mixture | asked), memory=None
    )
