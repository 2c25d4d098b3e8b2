"""The key that was meant."""

import pytest

from proximo.commands.pipeline.recipe import PipelineRecipe
from proximo.config.ppo.options import PPOConfig
from proximo.config.schema.fields import key_paths
from proximo.config.schema.suggestions import NEEDLESS_KEYS, OTHER_TOOLS_KEYS, RENAMED, suggestions
from proximo.errors import ConfigError
from proximo.ppo.recipe import PPORecipe
from proximo.supervised.dpo.recipe import DPORecipe
from proximo.supervised.kto.recipe import KTORecipe
from proximo.supervised.prm.recipe import PRMRecipe
from proximo.supervised.reward.recipe import RewardRecipe
from proximo.supervised.sft.recipe import SFTConfig, SFTRecipe

RECIPES = (SFTRecipe, RewardRecipe, PRMRecipe, DPORecipe, KTORecipe, PPORecipe, PipelineRecipe)


def best(typed, schema=PPORecipe, tree=None):
    found = suggestions(tuple(typed.split(".")), schema, tree or {})
    return found[0] if found else None


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("learning_rate", "ppo.policy_optimizer.learning_rate"),
        ("ppo.learning_rate", "ppo.policy_optimizer.learning_rate"),
        ("ppo.value_optimizer.learning_rat", "ppo.value_optimizer.learning_rate"),
        ("ppo.epoch_per_step", "ppo.epochs_per_step"),
        ("epochs_per_step", "ppo.epochs_per_step"),
        ("ppo.kl_coefficient", "ppo.kl.coefficient"),
        ("ppo.kl.coef", "ppo.kl.coefficient"),
        ("ppo.Num-Steps", "ppo.num_steps"),
        ("lr", "ppo.policy_optimizer.learning_rate"),
        ("ppo.gae_lambda", "ppo.advantage.gae_lambda"),
        ("run.output_dir", "run.folder"),
        ("tokeniser", "tokenizer"),
        ("reward.1.pth", "reward.1.path"),
        ("model.lora.r", "model.lora.rank"),
        ("data.max_tokens", "data.max_prompt_tokens"),
    ],
)
def test_the_nearest_key_of_the_whole_recipe_is_found(typed, meant):
    assert best(typed, tree={"reward": [{"kind": "model"}, {"kind": "model"}]}) == meant


def test_a_recipe_with_one_model_has_it_under_model():
    assert best("policy", DPORecipe) == best("policy", KTORecipe) == "model"


REWARD_KINDS = {
    "arguments": "function",
    "each_number": "countdown",
    "first_pause_seconds": "remote",
    "judge_class": "verifier",
    "limit_each_test": "code",
    "no_answer": "maths",
    "no_program": "code",
    "opened_by_prompt": "think_answer",
    "requests_at_once": "remote",
    "right": "maths",
    "right_reads": "think_answer",
    "satisfies": "json_schema",
    "several_boxes": "maths",
    "unfenced": "code",
    "well_formed_credit": "think_answer",
    "wrong": "countdown",
    "zero_as_minus_one": "think_answer",
}
"""Former keys of reward sources, and a kind that had each."""


@pytest.mark.parametrize(("former", "kind"), REWARD_KINDS.items())
def test_a_former_key_of_a_reward_source_leads_to_the_one_of_today(former, kind):
    tree = {"reward": [{"kind": "model"}, {"kind": kind}]}
    assert best(f"reward.1.{former}", tree=tree) == f"reward.1.{RENAMED[former]}"


@pytest.mark.parametrize(("former", "now"), [pair for pair in RENAMED.items() if pair[0] not in REWARD_KINDS])
def test_a_key_of_an_earlier_version_leads_to_the_one_of_today(former, now):
    """In a recipe, in a pipeline, and in a section that is made in Python."""
    schema = RewardRecipe if former == "model.start" else PPORecipe
    within = {"rejection": ("ppo", "policy_loss")}.get(former.split(".")[0], ("ppo",))
    prefix = () if former.split(".")[0] in ("value", "model") else within
    path = ".".join((*prefix, former))
    found = ".".join((*prefix, now))
    tree = {"ppo": {"policy_loss": {"rejection": {"kind": "divergence"}}}}
    assert best(path, schema, tree) == found
    if schema is PPORecipe:
        assert best(f"ppo.{path}", PipelineRecipe, {"ppo": tree}) == f"ppo.{found}"
    if prefix == ("ppo",):
        assert best(former, PPOConfig) == now


def test_in_a_pipeline_the_stage_that_was_meant_is_kept():
    assert best("ppo.learning_rate", PipelineRecipe) == "ppo.ppo.policy_optimizer.learning_rate"
    assert best("sft.learning_rate", PipelineRecipe) == "sft.sft.optimizer.learning_rate"


@pytest.mark.parametrize("typed", ["xyzzy", "ppo.qqq", "q"])
def test_nothing_is_suggested_where_nothing_is_near(typed):
    assert best(typed) is None


@pytest.mark.parametrize("schema", RECIPES)
def test_what_was_typed_is_never_suggested(schema):
    for path, _ in list(key_paths(schema))[::11]:
        assert ".".join(path) not in suggestions(path, schema, {})


def test_every_name_from_elsewhere_leads_to_a_key():
    known = [".".join(("", *path)) for schema in RECIPES for path, _ in key_paths(schema)]
    for name, meant in OTHER_TOOLS_KEYS.items():
        for each in meant.split():
            assert any(path.endswith(f".{each}") for path in known), name
            assert any((best(name, schema) or "").endswith(each) for schema in RECIPES), (name, each)


SHARED_NAMES_OF_TRL = {
    "adam_beta2": "betas",
    "bf16": "run.precision",
    "eval_strategy": "run.evaluate_every_steps",
    "gradient_accumulation_steps": "tokens_per_microbatch",
    "gradient_checkpointing": "model.activation_checkpointing",
    "learning_rate": "optimizer.learning_rate",
    "lr_scheduler_type": "optimizer.schedule",
    "model_name_or_path": "model.path",
    "output_dir": "run.folder",
    "peft_config": "model.lora",
    "report_to": "run.sinks",
    "save_steps": "run.save_every_steps",
    "save_total_limit": "run.keep_last",
    "train_dataset": "data.sources",
    "warmup_ratio": "optimizer.warmup_updates",
}
"""A name of transformers' TrainingArguments -> the end of its key in every trainer."""
NAMES_OF_TRL = {
    DPORecipe: {
        "max_length": "data.max_tokens",
        "max_prompt_length": "data.max_tokens",
        "max_steps": "dpo.num_epochs",
        "num_train_epochs": "dpo.num_epochs",
        "per_device_train_batch_size": "dpo.pairs_per_step",
        "beta": "dpo.beta",
        "ref_model": "reference",
        "loss_type": "dpo.loss",
    },
    KTORecipe: {"max_steps": "kto.num_epochs", "per_device_train_batch_size": "kto.examples_per_step"},
    PPORecipe: {
        "beta": "ppo.kl.coefficient",
        "epsilon_high": "ppo.policy_loss.clip_high",
        "lam": "ppo.advantage.gae_lambda",
        "max_completion_length": "ppo.rollout.max_new_tokens",
        "max_prompt_length": "data.max_prompt_tokens",
        "max_steps": "ppo.num_steps",
        "num_generations": "ppo.responses_per_prompt",
        "num_train_epochs": "ppo.num_steps",
        "per_device_train_batch_size": "ppo.prompts_per_step",
        "response_length": "ppo.rollout.max_new_tokens",
        "reward_funcs": "reward",
        "total_episodes": "ppo.num_steps",
        "use_vllm": "engine",
        "value_model": "value",
    },
    RewardRecipe: {
        "center_rewards_coefficient": "reward.score_centring",
        "max_length": "data.max_tokens",
        "max_steps": "reward.num_epochs",
        "per_device_train_batch_size": "reward.pairs_per_step",
    },
    SFTRecipe: {
        "assistant_only_loss": "data.train_on",
        "max_length": "data.max_tokens",
        "max_steps": "sft.num_epochs",
        "num_steps": "sft.num_epochs",
        "packing": "data.layout",
        "per_device_train_batch_size": "sft.examples_per_step",
    },
}


@pytest.mark.parametrize("schema", NAMES_OF_TRL)
@pytest.mark.parametrize("in_section", [False, True])
def test_the_usual_names_of_trl_lead_to_the_key_of_the_trainer(schema, in_section):
    section = {DPORecipe: "dpo.", KTORecipe: "kto.", PPORecipe: "ppo.", RewardRecipe: "reward.", SFTRecipe: "sft."}
    for name, meant in {**SHARED_NAMES_OF_TRL, **NAMES_OF_TRL[schema]}.items():
        if in_section and meant == f"{section[schema]}{name}":
            continue
        found = best(f"{section[schema] if in_section else ''}{name}", schema)
        assert (found or "").endswith(meant), (name, found)


@pytest.mark.parametrize("name", ["reward_funcs", "value_model", "use_vllm"])
def test_what_a_trainer_lacks_is_not_taken_for_the_device_of_it(name):
    assert best(name, SFTRecipe) is None


@pytest.mark.parametrize("name", NEEDLESS_KEYS)
def test_a_name_from_elsewhere_that_needs_no_key_says_why(name):
    with pytest.raises(ConfigError, match=f"SFTConfig: {name} is not a known key, and none is needed: "):
        SFTConfig(**{name: True})
    for schema in RECIPES:
        assert name not in {path[-1] for path, _ in key_paths(schema)}
