"""What saves memory in the runs of all trainers: it changes no weight that it should not, and is refused where it must.

Not the parts by themselves: those have their tests in learner/ and models/.
"""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from proximo.config.ppo import PPOConfig
from proximo.config.recipes import PPORecipe, RewardRecipe, SFTRecipe
from proximo.config.run import OptimizerConfig
from proximo.trainers import loop
from proximo.trainers.options import RunOptions
from run_outcomes import outcome
from tiny_runs import KINDS, Kind, changed, make_inputs, recipe_of, run

OPTIMIZERS: dict[Kind, tuple[str, ...]] = {
    "sft": ("sft.optimizer",),
    "reward": ("reward.optimizer",),
    "ppo": ("ppo.policy_optimizer", "ppo.value_optimizer"),
}
FREE = {"max_gradient_norm": None, "non_finite_gradient": "stop"}
EARLY = FREE | {"in_backward": True}


def with_optimizers(kind: Kind, options: dict[str, Any], **others: Any) -> dict[str, Any]:
    """Changes of a recipe: the options of all of its optimizers, and micro-batches that hold a whole update."""
    changes: dict[str, Any] = {f"{kind}.tokens_per_microbatch": 400}
    return changes | {f"{key}.{name}": value for key in OPTIMIZERS[kind] for name, value in options.items()} | others


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_in_the_backward_ends_with_the_weights_of_an_ordinary_one(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "write_report", lambda folder: folder / "report.html")  # plots take longer than the runs
    found = []
    for name, options in (("ordinary", FREE), ("early", EARLY)):
        place = make_inputs(tmp_path / name)
        recipe = changed(recipe_of(kind, place), with_optimizers(kind, options))
        assert run(kind, recipe, RunOptions(quiet=True)) == 0
        found.append(outcome(place / "run"))
    weights = [{key: value for key, value in each.items() if key.endswith(".safetensors")} for each in found]
    assert weights[0] == weights[1]
    assert any("optimizer" in key for key in weights[0])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"non_finite_gradient": "stop"}, "before the norm of all gradients is known.*max_gradient_norm: null"),
        ({"max_gradient_norm": None}, "cannot be skipped any more: set non_finite_gradient: stop"),
    ],
)
def test_what_an_update_in_the_backward_cannot_do_must_be_off(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        OptimizerConfig(learning_rate=1e-3, in_backward=True, **options)


@pytest.mark.parametrize("guard", ["max_ratio", "max_kl", "target_kl"])
def test_guards_and_a_policy_that_steps_in_the_backward_exclude_each_other(guard: str) -> None:
    early = {"learning_rate": 1e-3} | EARLY
    with pytest.raises(ValidationError, match=f"guards.{guard} cannot skip the update"):
        PPOConfig.model_validate({"policy_optimizer": early, "guards": {guard: 2.0}})
    PPOConfig.model_validate({"value_optimizer": early, "guards": {guard: 2.0}})


@pytest.mark.parametrize(("kind", "longest"), [("sft", 4 * 48), ("reward", 2 * 4 * 48), ("ppo", 3 * (12 + 4))])
def test_an_update_in_the_backward_must_fit_one_micro_batch_whatever_the_data(
    kind: Kind, longest: int, tmp_path: Path
) -> None:
    schema = {"sft": SFTRecipe, "reward": RewardRecipe, "ppo": PPORecipe}[kind]
    fitting = with_optimizers(kind, EARLY) | {f"{kind}.tokens_per_microbatch": longest}
    schema.model_validate(changed(recipe_of(kind, tmp_path), fitting))
    tight = fitting | {f"{kind}.tokens_per_microbatch": longest - 1}
    with pytest.raises(ValidationError, match=rf"may have {longest} tokens: set {kind}\.tokens_per_microbatch"):
        schema.model_validate(changed(recipe_of(kind, tmp_path), tight))
