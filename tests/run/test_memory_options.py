"""What saves memory in the runs of all trainers: it changes no weight that it should not, and is refused where it must.

Not the parts by themselves: those have their tests in learner/ and models/.
"""

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from builders import tiny_language_model, tiny_tokenizer
from proximo.config.ppo.options import PPOConfig
from proximo.models.backbone import Backbone
from proximo.ppo import trainer
from proximo.ppo.roles import policy
from proximo.run.memory import release_cache
from proximo.run.options import RunOptions
from proximo.trainer_kinds import recipe_kind
from run_outcomes import outcome
from tiny_runs import Kind, changed, make_inputs, recipe_of, run

OPTIMIZERS: dict[Kind, tuple[str, ...]] = {
    "sft": ("sft.optimizer",),
    "reward": ("reward.optimizer",),
    "dpo": ("dpo.optimizer",),
    "kto": ("kto.optimizer",),
    "ppo": ("ppo.policy_optimizer", "ppo.value_optimizer"),
}
FREE = {"max_gradient_norm": None, "non_finite_gradient": "stop"}
EARLY = FREE | {"in_backward": True}


def with_optimizers(kind: Kind, options: dict[str, Any], **others: Any) -> dict[str, Any]:
    """Changes of a recipe: the options of all of its optimizers, and micro-batches that hold a whole update."""
    changes: dict[str, Any] = {f"{kind}.tokens_per_microbatch": 400}
    return changes | {f"{key}.{name}": value for key in OPTIMIZERS[kind] for name, value in options.items()} | others


@pytest.mark.parametrize("kind", ["sft", "reward", "ppo"])
def test_a_run_in_the_backward_ends_with_the_weights_of_an_ordinary_one(
    kind: Kind, tmp_path: Path, no_report: None
) -> None:
    found = []
    for name, options in (("ordinary", FREE), ("early", EARLY)):
        place = make_inputs(tmp_path / name)
        recipe = changed(recipe_of(kind, place), with_optimizers(kind, options))
        assert run(kind, recipe, RunOptions(quiet=True)) == 0
        found.append(outcome(place / "run"))
    weights = [{key: value for key, value in each.items() if key.endswith(".safetensors")} for each in found]
    assert weights[0] == weights[1]
    assert any("optimizer" in key for key in weights[0])


@pytest.mark.parametrize("guard", ["max_ratio", "max_kl", "target_kl"])
def test_guards_and_a_policy_that_steps_in_the_backward_exclude_each_other(guard: str) -> None:
    early = {"learning_rate": 1e-3} | EARLY
    with pytest.raises(ValidationError, match=f"guards.{guard} cannot skip an update"):
        PPOConfig.model_validate({"policy_optimizer": early, "guards": {guard: 2.0}})
    PPOConfig.model_validate({"value_optimizer": early, "guards": {guard: 2.0}})


@pytest.mark.parametrize(
    ("kind", "longest"),
    [("sft", 4 * 48), ("reward", 2 * 4 * 48), ("dpo", 2 * 4 * 48), ("kto", 4 * 48), ("ppo", 3 * (12 + 4))],
)
def test_an_update_in_the_backward_must_fit_one_micro_batch_whatever_the_data(
    kind: Kind, longest: int, tmp_path: Path
) -> None:
    schema = recipe_kind(kind).schema
    fitting = with_optimizers(kind, EARLY) | {f"{kind}.tokens_per_microbatch": longest}
    schema.model_validate(changed(recipe_of(kind, tmp_path), fitting))
    tight = fitting | {f"{kind}.tokens_per_microbatch": longest - 1}
    with pytest.raises(ValidationError, match=rf"may have {longest} tokens: set {kind}\.tokens_per_microbatch"):
        schema.model_validate(changed(recipe_of(kind, tmp_path), tight))


@pytest.mark.parametrize(("kind", "num_models"), [("sft", 1), ("reward", 1), ("ppo", 2)])
def test_every_model_that_trains_is_compiled_as_the_recipe_says(
    kind: Kind, num_models: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    monkeypatch.setattr(Backbone, "compile", lambda backbone, backend: found.append(backend))
    recipe = changed(recipe_of(kind, make_inputs(tmp_path)), {"run.compile": "aot_eager"})
    made = recipe_kind(kind)
    made.build(made.schema.model_validate(recipe))
    assert found == ["aot_eager"] * num_models


def test_the_cache_is_released_once_a_step_between_rollout_and_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, which has none, with the calls to the accelerator counted."""
    calls: list[str] = []
    monkeypatch.setattr(trainer, "check_release", lambda wanted, device: None)
    monkeypatch.setattr(policy, "release_cache", lambda device: release_cache(torch.device("cuda")))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("release"))
    config = PPOConfig(num_steps=2, prompts_per_step=2, rollout={"max_new_tokens": 3}, release_cache=True)
    made = trainer.PPOTrainer(tiny_language_model(), tiny_tokenizer(), config=config)
    for name, learner in made.learners.items():
        monkeypatch.setattr(learner.optimizer, "step", lambda name=name: calls.append(name))
    made.train(["ab", "c"], reward=lambda prompts, responses, metadata: [1.0, 0.0])
    assert [name for name, _ in groupby(calls)] == ["release", "policy", "value"] * 2
    assert calls.count("release") == 2
