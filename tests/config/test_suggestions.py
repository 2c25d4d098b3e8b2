"""The key that was meant."""

import pytest

from proximo.commands.pipeline.recipe import PipelineRecipe
from proximo.config.schema.fields import key_paths
from proximo.config.schema.validation_messages import suggestions
from proximo.ppo.recipe import PPORecipe
from proximo.trainer_kinds import recipe_kinds


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
        ("ppo.gae_lambda", "ppo.advantage.gae_lambda"),
        ("run.thread", "run.num_threads"),
        ("tokeniser", "tokenizer"),
        ("reward.1.pth", "reward.1.path"),
        ("data.max_tokens", "data.max_prompt_tokens"),
    ],
)
def test_the_nearest_key_of_the_whole_recipe_is_found(typed, meant):
    assert best(typed, tree={"reward": [{"kind": "model"}, {"kind": "model"}]}) == meant


def test_in_a_pipeline_the_stage_that_was_meant_is_kept():
    assert best("ppo.learning_rate", PipelineRecipe) == "ppo.ppo.policy_optimizer.learning_rate"
    assert best("sft.learning_rate", PipelineRecipe) == "sft.sft.optimizer.learning_rate"


@pytest.mark.parametrize("typed", ["xyzzy", "ppo.qqq", "q"])
def test_nothing_is_suggested_where_nothing_is_near(typed):
    assert best(typed) is None


def test_what_was_typed_is_never_suggested():
    for kind in recipe_kinds():
        for path, _ in list(key_paths(kind.schema))[::11]:
            assert ".".join(path) not in suggestions(path, kind.schema, {})
