"""The section `devices`: what it says of each role, what is refused, and what has no effect."""

import pytest

from proximo.config.devices import devices_conflicts
from proximo.config.ineffective_keys import ineffective_keys
from proximo.config.loader import load_recipe
from proximo.errors import ConfigError
from recipe_files import DPO, KTO, PIPELINE, PPO, SFT, write_recipe

TEXTS = {"sft": SFT, "dpo": DPO, "kto": KTO, "ppo": PPO, "pipeline": PIPELINE}
LORA = "model={path: a/b, lora: {rank: 8}}"


def loaded(tmp_path, kind, *overrides):
    return load_recipe(kind, write_recipe(tmp_path, TEXTS[kind], f"{kind}.yaml"), overrides).recipe


def roles(recipe):
    return [(each.role, each.trains, each.shares, each.follows) for each in recipe.placed_roles()]


def test_each_trainer_says_which_models_lie_on_the_ranks(tmp_path):
    assert roles(loaded(tmp_path, "sft")) == [("model", True, None, None)]
    for kind in ("dpo", "kto"):
        assert roles(loaded(tmp_path, kind)) == [("model", True, None, None), ("reference", False, None, None)]
        assert roles(loaded(tmp_path, kind, "model.lora.rank=8"))[1] == ("reference", False, "model", None)
    assert roles(loaded(tmp_path, "ppo")) == [
        ("policy", True, None, None),
        ("reference", False, None, None),
        ("value", True, None, None),
        ("reward", False, None, None),
    ]
    moving = "ppo.average_decay=0.9", "ppo.kl.reference_every_steps=5", "value.init_from=trunk"
    assert roles(loaded(tmp_path, "ppo", *moving)) == [
        ("policy", True, None, None),
        ("reference", False, None, "policy"),
        ("value", True, "policy", None),
        ("reward", False, None, None),
        ("average", False, None, "policy"),
    ]
    on_base = LORA, "value.lora.rank=8", "reward=[{kind: model, path: a/c, share_base: true}]"
    assert roles(loaded(tmp_path, "ppo", *on_base))[1:] == [
        ("reference", False, "policy", None),
        ("value", True, "policy", None),
        ("reward", False, "policy", None),
    ]


REFUSED = [
    ("ppo", ["devices.shard_size=3"], "devices.shard_size (3) must divide the number of ranks (4): use one of 1, 2, 4"),
    ("ppo", ["run.compile=inductor"], "run.compile inductor compiles whole layers, but those of model are sharded"),
    (
        "ppo",
        ["run.compile=inductor", "devices.policy.shard=replicate"],
        "set devices.value.shard to replicate, or run.compile to none",
    ),
    (
        "pipeline",
        ["ppo.ppo.value_optimizer={learning_rate: 1e-5, kind: adamw_8bit}"],
        "ppo.value_optimizer.kind adamw_8bit rounds its moments",
    ),
    (
        "ppo",
        [LORA, "model.quantisation=4bit", "value.lora.rank=8"],
        "model.quantisation 4bit stores blocks with scales of their own",
    ),
    ("ppo", ["ppo.average_decay=0.9", "devices.policy.shard=grads"], "set devices.average.shard to grads"),
    (
        "ppo",
        ["ppo.kl.reference_every_steps=5", "devices.policy.offload=always"],
        "set devices.reference.offload to always",
    ),
    ("ppo", [LORA, "devices.reference.shard=replicate"], "reference runs on the weights of policy"),
    ("ppo", [LORA, "devices.policy.shard=replicate"], "set devices.reference.shard to replicate"),
    ("ppo", ["value.init_from=trunk", "devices.value.shard=grads"], "set devices.value.shard to full"),
]


@pytest.mark.parametrize(("kind", "overrides", "piece"), REFUSED)
def test_what_cannot_lie_on_several_ranks_is_refused_where_their_number_is_known(tmp_path, kind, overrides, piece):
    recipe = loaded(tmp_path, kind, *overrides)
    assert piece in next(devices_conflicts(recipe, 4))
    assert not [*devices_conflicts(recipe, 1)]
    with pytest.raises(ConfigError) as refused:
        loaded(tmp_path, kind, *overrides, "devices.num=4")
    assert piece in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [("ppo", [LORA]), ("dpo", ["model.lora.rank=8"]), ("ppo", ["model.frozen_layers=1"])],
)
def test_weights_that_another_model_uses_stay_on_the_device(tmp_path, kind, overrides):
    recipe = loaded(tmp_path, kind, *overrides, "devices.offload=idle")
    assert "set devices.reference.offload to none" in next(devices_conflicts(recipe, 1))
    recipe = loaded(tmp_path, kind, *overrides, "devices={offload: idle, reference: {offload: none}}")
    assert not [*devices_conflicts(recipe, 1)]
    assert not [*devices_conflicts(recipe, 2)]


FINE = [
    ["devices.shard_size=2"],
    ["run.compile=inductor", "devices.shard=replicate"],
    ["ppo.average_decay=0.9", "ppo.kl.reference_every_steps=5", "devices.offload=always"],
    ["ppo.average_decay=0.9", "devices.average.offload=idle"],
    [LORA, "ppo.average_decay=0.9", "devices.policy.offload=idle"],
    [LORA, "model.quantisation=4bit", "value.lora.rank=8", "devices.shard=replicate"],
    ["value.init_from=trunk", "devices.policy.shard=replicate"],
    ["value.init_from=trunk", "devices.policy.shard=grads", "devices.value.shard=grads"],
]


@pytest.mark.parametrize("overrides", FINE)
def test_other_places_than_the_default_are_taken(tmp_path, overrides):
    assert not [*devices_conflicts(loaded(tmp_path, "ppo", *overrides, "devices.num=4"), 4)]


def test_stages_of_a_pipeline_run_on_the_same_ranks_and_choose_how_their_models_lie(tmp_path):
    recipe = loaded(tmp_path, "pipeline", "devices={num: 2, shard: grads}", "ppo.devices.shard=replicate")
    assert [(stage.devices.num, stage.devices.shard) for _, stage in recipe.given_stages()] == [
        (2, "grads"),
        (2, "grads"),
        (2, "replicate"),
    ]
    with pytest.raises(ConfigError, match=r"sft\.devices\.num is 3, but all stages run on the ranks of the pipeline"):
        loaded(tmp_path, "pipeline", "devices.num=2", "sft.devices.num=3")


NOTES = [
    ("ppo", ["devices={num: 1, shard: grads, offload: idle}"], ["devices.shard has no effect: num is 1"]),
    (
        "ppo",
        ["ppo.advantage=return_to_go", "reward=[{kind: pattern, pattern: a}]", "devices.value.shard=grads"],
        ["devices.value has no effect: the run has no such model"],
    ),
    ("sft", ["devices.policy.shard=grads"], ["devices.policy has no effect: the run has no such model"]),
    (
        "sft",
        ["devices.shard=replicate", "devices.shard_size=2", "devices.reduce_gradients=microbatch"],
        [
            "devices.shard_size has no effect: no model is sharded",
            "devices.reduce_gradients has no effect: no model that trains is sharded",
        ],
    ),
    (
        "dpo",
        ["devices.reference.device=cuda:1"],
        ["devices.reference.device has no effect: only PPO has models on several devices of one process"],
    ),
    ("ppo", ["devices.reference.token_env=T"], ["devices.reference.token_env has no effect: addresses is empty"]),
    ("ppo", ["reference.path=a/b", "devices.reference.addresses=['http://t:8000']"], []),
    ("pipeline", ["devices.policy.shard=grads"], []),
    (
        "pipeline",
        ["reward.devices.value.shard=grads"],
        ["reward.devices.value has no effect: the run has no such model"],
    ),
    ("ppo", ["devices.shard=grads", "devices.shard_size=2", "devices.reduce_gradients=microbatch"], []),
]


@pytest.mark.parametrize(("kind", "overrides", "told"), NOTES)
def test_keys_of_devices_that_do_nothing_are_told(tmp_path, kind, overrides, told):
    assert [each for each in ineffective_keys(loaded(tmp_path, kind, *overrides)) if "devices" in each] == told
