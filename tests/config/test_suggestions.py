"""The key that was meant."""

import pytest

from proximo.commands.pipeline.recipe import PipelineRecipe
from proximo.config.ppo.options import PPOConfig
from proximo.config.schema.fields import key_paths
from proximo.config.schema.suggestions import OTHER_TOOLS_KEYS, RENAMED, suggestions
from proximo.ppo.recipe import PPORecipe
from proximo.supervised.dpo.recipe import DPORecipe
from proximo.supervised.kto.recipe import KTORecipe
from proximo.supervised.reward.recipe import RewardRecipe
from proximo.supervised.sft.recipe import SFTRecipe

RECIPES = (SFTRecipe, RewardRecipe, DPORecipe, KTORecipe, PPORecipe, PipelineRecipe)


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
        assert any(path.endswith(f".{meant}") for path in known), name
        assert any(best(name, schema) is not None for schema in RECIPES), name
