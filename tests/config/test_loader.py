"""A recipe file and overrides become a recipe, or one message with every mistake."""

import json
from math import nan

import pytest
from pydantic import ValidationError

from proximo.config.ineffective_keys import ineffective_keys
from proximo.config.loader import load_recipe, resolved_yaml
from proximo.config.ppo.options import PPOConfig
from proximo.errors import ConfigError, UserError
from proximo.trainer_kinds import recipe_kind, recognise
from recipe_files import DPO, KTO, PIPELINE, PPO, REWARD, SFT, write_recipe

TEXTS = {"sft": SFT, "reward": REWARD, "dpo": DPO, "kto": KTO, "ppo": PPO, "pipeline": PIPELINE}


def refusal(folder, text, *overrides, kind="ppo"):
    with pytest.raises(ConfigError) as caught:
        load_recipe(kind, write_recipe(folder, text), overrides)
    return str(caught.value).replace(str(folder), "")


@pytest.mark.parametrize("kind", TEXTS)
def test_a_recipe_of_each_kind_loads(folder, kind):
    loaded = load_recipe(kind, write_recipe(folder, TEXTS[kind]))
    assert isinstance(loaded.recipe, recipe_kind(kind).schema)
    assert loaded.text == TEXTS[kind]
    assert recognise(recipe_kind(kind).schema.model_dump(loaded.recipe)) is recipe_kind(kind)
    other = "ppo" if kind != "ppo" else "sft"
    assert refusal(folder, TEXTS[kind], kind=other) == (
        f"/r.yaml is a recipe for `proximo {kind}`, not for `proximo {other}`"
    )


def test_the_kept_text_names_its_overrides_in_comments_and_loads_again(folder):
    loaded = load_recipe("ppo", write_recipe(folder, PPO), ["run.seed=3", "ppo.advantage.gae_lambda=1"])
    assert loaded.text == "# override: run.seed=3\n# override: ppo.advantage.gae_lambda=1\n" + PPO
    assert (loaded.recipe.run.seed, loaded.recipe.ppo.advantage.gae_lambda) == (3, 1.0)
    assert load_recipe("ppo", write_recipe(folder, loaded.text)).recipe.run.seed == 0


@pytest.mark.parametrize("kind", TEXTS)
def test_the_resolved_recipe_is_a_recipe_with_the_same_values(folder, kind):
    overrides = ["run.folder='1e5'", "run.seed=3"]
    recipe = load_recipe(kind, write_recipe(folder, TEXTS[kind]), overrides).recipe
    resolved = resolved_yaml(recipe)
    assert load_recipe(kind, write_recipe(folder, resolved, "resolved.yaml")).recipe == recipe
    assert recipe_kind(kind).schema.model_validate(json.loads(recipe.model_dump_json())) == recipe
    assert recipe.run.folder == "1e5"


def test_a_section_given_in_part_keeps_its_default_for_the_rest(folder):
    recipe = load_recipe("sft", write_recipe(folder, SFT), ["sft.optimizer.learning_rate=1e-4"]).recipe
    assert (recipe.sft.optimizer.learning_rate, recipe.sft.optimizer.schedule) == (1e-4, "cosine")
    assert load_recipe("sft", write_recipe(folder, SFT), ["run.precision=bfloat16"]).recipe.run.precision == "bf16"
    recipe = load_recipe("ppo", write_recipe(folder, PPO), ["ppo.value_optimizer.weight_decay=0.1"]).recipe
    assert (recipe.ppo.value_optimizer.learning_rate, recipe.ppo.value_optimizer.weight_decay) == (1e-5, 0.1)


def test_stages_of_a_pipeline_share_its_run(folder):
    recipe = load_recipe("pipeline", write_recipe(folder, PIPELINE), ["run.keep_last=5"]).recipe
    assert [s.run.folder for s in (recipe.sft, recipe.reward, recipe.ppo)] == [
        "runs/x/sft",
        "runs/x/reward",
        "runs/x/ppo",
    ]
    assert {s.run.seed for s in (recipe.sft, recipe.reward, recipe.ppo)} == {7}
    assert {s.run.keep_last for s in (recipe.sft, recipe.reward, recipe.ppo)} == {5}
    assert (recipe.sft.run.precision, recipe.reward.run.precision) == ("float32", "bf16")


def test_all_mistakes_are_listed_at_once_with_line_key_and_what_is_wanted(folder):
    text = PPO.replace("num_steps: 10", "num_stps: 10\n  advantage: {gamma: two}") + "run2: 3\n"
    assert refusal(folder, text, "run.seed=-1", "ppo.kl.kind=reword") == (
        "/r.yaml has 5 mistakes:\n"
        "  line 13: ppo.num_stps is not a known key; did you mean ppo.num_steps?\n"
        "  line 14: ppo.advantage.gamma must be a valid number, unable to parse string as a number, got 'two'\n"
        "  line 15: run2 is not a known key; did you mean run?\n"
        "  override run.seed=-1: run.seed must be greater than or equal to 0, got -1\n"
        "  override ppo.kl.kind=reword: ppo.kl.kind must be one of reward, loss, margin, none, got 'reword'"
    )


@pytest.mark.parametrize(
    ("override", "pieces"),
    [
        ("ppo.num_steps=1.5", ["a whole number", "got 1.5"]),
        ("ppo.num_steps=true", ["a whole number", "true"]),
        ("run.seed=1e99", ["run.seed must be a smaller whole number", "got 1e+99"]),
        ("ppo.num_steps=1e999", ["a finite number", "inf"]),
        ("ppo.advantage.gamma=.nan", ["ppo.advantage.gamma must be a finite number"]),
        ("ppo.top_p=0.9", ["did you mean ppo.rollout.top_p?"]),
        ("run.tensorboard=perhaps", ["true or false", "'perhaps'"]),
        ("run.folder=3", ["text (put it in quotes)", "got 3"]),
        ("run=3", ["a section"]),
        ("model.lora=16", ["a section or null", "got 16"]),
        ("model.lora.target_modules=3", ["a list or 'all-linear'"]),
        ("ppo.policy_optimizer={learning_rate: 1, betas: [0.9]}", ["betas is a list with too few items"]),
        ("data.sources=[]", ["data.sources must be a list of at least 1, got a list of 0"]),
        ("data.sources.0.columns=x", ["a mapping, got 'x'"]),
        ("reward.0.kind=modle", ["reward.0.kind must be one of model, prm, function, ", "got 'modle'"]),
        ("reward.1.path=x", ["reward.1.kind must be one of model, prm, function", "got null"]),
        ("reward.0.function=m:f", ["reward.0.function is for kind function, and this is of kind model"]),
        ("reward.0.pth=x", ["did you mean reward.0.path?"]),
        ("model.path=null", ["model: exactly one of path", "and config"]),
        ("model.path=@sft", ["'@sft'", "in a pipeline only"]),
        ("value.init_from=path", ["value: init_from: path needs exactly one of path and config"]),
    ],
)
def test_each_mistake_says_what_came_and_what_is_wanted(folder, override, pieces):
    message = refusal(folder, PPO, override)
    assert message.startswith(f"/r.yaml, override {override}: ")
    assert "\n" not in message
    for piece in pieces:
        assert piece in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"solved_score": nan}, "solved_score must be a finite number or null, got nan"),
        (
            {"evaluation_samples_per_prompt": 0},
            "evaluation_samples_per_prompt must be greater than or equal to 1",
        ),
    ],
)
def test_a_wrong_setting_of_an_evaluation_is_named(folder, changes, message):
    recipe = load_recipe("ppo", write_recipe(folder, PPO)).recipe
    with pytest.raises(UserError) as caught:
        recipe.with_evaluation_settings(changes)
    assert str(caught.value).startswith(message)


def test_what_is_wrong_with_the_shared_run_of_a_pipeline_is_said_once(folder):
    message = refusal(folder, PIPELINE.replace("seed: 7", "sed: 7"), kind="pipeline")
    assert message == "/r.yaml, line 3: run.sed is not a known key; did you mean run.seed?"
    message = refusal(folder, PIPELINE[PIPELINE.index("sft:") :], kind="pipeline")
    assert message.startswith("/r.yaml: run is missing: Shared by all stages")
    assert "\n" not in message


def test_a_stage_of_a_pipeline_cannot_choose_its_folder(folder):
    assert "sft.run.folder follows from run.folder (runs/x/sft)" in refusal(
        folder, PIPELINE, "sft.run.folder=elsewhere", kind="pipeline"
    )


@pytest.mark.parametrize(
    ("override", "piece"),
    [
        ("sft.model.path=@reward", "stage comes before it; those that do: none"),
        ("reward.model.path=@ppo", "those that do: @sft"),
        ("ppo.model.path=@sftt", "those that do: @sft, @reward"),
    ],
)
def test_a_stage_takes_only_what_an_earlier_one_made(folder, override, piece):
    assert piece in refusal(folder, PIPELINE, override, kind="pipeline")


def test_a_byte_order_mark_and_windows_line_ends_are_fine(folder):
    (folder / "windows.yaml").write_bytes(b"\xef\xbb\xbf" + PPO.replace("\n", "\r\n").encode())
    loaded = load_recipe("ppo", "windows.yaml", ["run.seed=1"])
    assert loaded.recipe.ppo.num_steps == 10
    assert load_recipe("ppo", write_recipe(folder, loaded.text)).recipe.ppo.num_steps == 10


def test_environment_variables_are_not_expanded(folder, monkeypatch):
    monkeypatch.setenv("PLACE", "secret")
    recipe = load_recipe("ppo", write_recipe(folder, PPO), ["run.folder=$PLACE/x"]).recipe
    assert recipe.run.folder == "$PLACE/x"


def test_a_recipe_cannot_be_changed(folder):
    recipe = load_recipe("ppo", write_recipe(folder, PPO)).recipe
    with pytest.raises(ValidationError, match="frozen"):
        recipe.run.seed = 3


def test_the_ppo_section_is_usable_by_itself_with_the_same_rules():
    assert PPOConfig(num_steps=3).responses_per_step == 64
    with pytest.raises(ConfigError, match="num_stps"):
        PPOConfig(num_stps=3)


EVALUATED = ["run.evaluate_every_steps=3", "ppo.evaluation_samples_per_prompt=2"]
MISMATCH = ["ppo.guards.max_mismatch=0.1", "run.precision=float32"]
SERVED = "devices.reference.addresses=['http://t:8000']"
NOT_STANDARDISED = "ppo.advantage={standardise: false, unbiased_variance: true}"
CRITICLESS = ["ppo.advantage.kind=group_centred", "ppo.responses_per_prompt=4"]
SCORE = ["normalise=standardise", "bias=1", "scale=2", "overlong_penalty=2", "penalty_mode=replace"]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([], []),
        (EVALUATED, ["run.evaluate_every_steps", "ppo.evaluation_samples_per_prompt"]),
        ([*EVALUATED, "data.held_out_rows=2"], []),
        ([*EVALUATED, "data.evaluation_sources=[{path: a/b}]"], []),
        (["reward.1={kind: pattern, pattern: a, weight: 0}"], ["reward.1.weight is 0"]),
        (MISMATCH, ["ppo.guards.max_mismatch"]),
        ([*MISMATCH, "run.precision=bf16"], []),
        ([*MISMATCH, "engine={kind: vllm}"], []),
        ([*MISMATCH, "ppo.rollout.staleness=1"], []),
        ([*CRITICLESS, "value.init_from=reward"], ["value"]),
        (["ppo.kl=none", "reference.path=a/b"], ["reference"]),
        ([SERVED, "reference={path: a/b, quantisation: 4bit}"], ["reference.quantisation"]),
        (["ppo.guards.target_kl=0.1", "ppo.guards.max_kl=0.2"], ["ppo.guards.max_kl"]),
        (
            ["ppo.advantage={length_adaptive: 0.05, gae_lambda: 0.9}"],
            ["ppo.advantage.gae_lambda has no effect: length_adaptive sets the decay of each response"],
        ),
        (
            ["ppo.advantage={kind: group_centred, resample_rounds: 3}", "ppo.responses_per_prompt=2"],
            ["ppo.advantage.resample_rounds has no effect: zero_variance_groups is not resample"],
        ),
        ([NOT_STANDARDISED], ["ppo.advantage.unbiased_variance has no effect: nothing is standardised"]),
        ([NOT_STANDARDISED, "ppo.score.whiten_rewards=zero_mean"], []),
        (
            ["ppo.evaluate_greedy=true", "ppo.rollout.greedy=true", "data.held_out_rows=2"],
            ["ppo.evaluate_greedy has no effect: rollout.greedy holds for evaluations too"],
        ),
        (["data.split_seed=1"], ["data.split_seed has no effect: without proportions nothing is split"]),
        (["data.sources.0.whole=true"], ["data.sources.0.whole"]),
        (
            [f"ppo.score.{each}" for each in SCORE],
            ["ppo.score.scale", "ppo.score.bias", "ppo.score.overlong_penalty", "ppo.score.penalty_mode"],
        ),
        (
            ["ppo.truncation=mask", "ppo.score.missing_eos_penalty=1"],
            ["ppo.score.missing_eos_penalty has no effect: truncation: mask leaves the responses out"],
        ),
    ],
)
def test_keys_that_do_nothing_are_told_and_no_others(folder, overrides, told):
    """Each sentence begins with what is wanted here."""
    found = ineffective_keys(load_recipe("ppo", write_recipe(folder, PPO), overrides).recipe)
    assert len(found) == len(told)
    for sentence, wanted in zip(found, told, strict=True):
        assert sentence.startswith(wanted if " " in wanted else f"{wanted} has no effect: ")


def test_keys_of_a_stage_that_do_nothing_are_told_with_its_name(folder):
    overrides = ["run.evaluate_every_steps=3", "reward.data.held_out_rows=2"]
    overrides += ["sft.sft.optimizer.schedule=constant", "sft.sft.optimizer.final_fraction=0.1"]
    told = ineffective_keys(load_recipe("pipeline", write_recipe(folder, PIPELINE), overrides).recipe)
    assert [sentence.split(" ")[0] for sentence in told] == [
        "sft.run.evaluate_every_steps",
        "sft.sft.optimizer.final_fraction",
        "ppo.run.evaluate_every_steps",
    ]


def test_a_section_without_variants_keeps_its_defaults_whatever_its_kind() -> None:
    """The kind of an optimizer is one of its settings; other keys do not depend on it."""
    for optimizer in ({"kind": "adamw_8bit"}, {"betas": (0.9, 0.99)}):
        default = PPOConfig().value_optimizer.learning_rate
        assert PPOConfig(value_optimizer=optimizer).value_optimizer.learning_rate == default


def test_a_key_missing_in_a_section_that_an_override_begins_is_a_mistake_of_the_override(folder) -> None:
    said = refusal(folder, PPO, "ppo.kl.adaptive.horizon=9000")
    assert said.startswith("/r.yaml, override ppo.kl.adaptive.horizon=9000: ppo.kl.adaptive.target is missing")
    text = PPO + "  kl: {adaptive: {horizon: 9000}}\n"
    assert refusal(folder, text, "ppo.kl.adaptive.horizon=8000").startswith("/r.yaml, line ")


def test_a_policy_optimizer_given_in_part_keeps_the_default_rate(folder) -> None:
    path, schedule = write_recipe(folder, PPO), "ppo.policy_optimizer.schedule=linear"
    for lora, rate in (([], 1e-6), (["model.lora.rank=4"], 1e-5)):
        optimizer = load_recipe("ppo", path, [schedule, *lora]).recipe.ppo.policy_optimizer
        assert (optimizer.schedule, optimizer.learning_rate) == ("linear", rate)
    given = load_recipe("ppo", path, [schedule, "ppo.policy_optimizer.learning_rate=3e-6"]).recipe
    assert given.ppo.policy_optimizer.learning_rate == 3e-6
    assert load_recipe("ppo", path).recipe.ppo.policy_optimizer is None
    stage = load_recipe("pipeline", write_recipe(folder, PIPELINE), [f"ppo.{schedule}"]).recipe.ppo
    assert (stage.ppo.policy_optimizer.schedule, stage.ppo.policy_optimizer.learning_rate) == ("linear", 1e-6)
