"""Estimators and objectives of a user's own in a run: by import path, as classes, as instances."""

import json
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from proximo import Training
from proximo.algorithms.advantages import StepRewards
from proximo.algorithms.objectives import TokenLosses
from proximo.commands.pipeline.run import resolved_values
from proximo.config.ppo.advantage import AdvantageConfig, GAEConfig, GroupCentredConfig
from proximo.config.ppo.objectives import ObjectiveConfig
from proximo.errors import ConfigError, RunFolderError
from tiny_runs import recipe_of, share_of_vowels


class TimesConfig(GroupCentredConfig):
    """The return minus the mean of its group, times a factor."""

    factor: float = 1.0

    def estimate(self, step: StepRewards) -> tuple[Any, None]:
        advantages, _ = super().estimate(step)
        return self.factor * advantages, None


class UnclippedConfig(ObjectiveConfig):
    """-scale r A."""

    scale: float = 1.0

    @property
    def formula(self) -> Callable[..., Any]:
        return unclipped


def unclipped(logprobs: Any, old_logprobs: Any, advantages: Any, *, scale: float) -> TokenLosses:
    loss = -scale * (logprobs - old_logprobs).exp() * advantages
    return TokenLosses(loss=loss, clipped=advantages.isnan())


pytestmark = pytest.mark.usefixtures("no_report")


def made(inputs: Path, folder: Path, changes: Mapping[str, Any]) -> Training:
    recipe = {key: section for key, section in recipe_of("ppo", inputs).items() if key != "value"}
    short = {"run.folder": str(folder), "run.evaluate_every_steps": None, "reward": [share_of_vowels]}
    return Training(recipe, {**short, "ppo.num_steps": 2, "ppo.responses_per_prompt": 2, **changes})


def numbers(training: Training) -> list[dict[str, float]]:
    wanted = ("score/", "advantage/", "policy/", "kl/", "response/")
    steps = [line for line in training.fit(quiet=True).metrics if "advantage/std" in line]
    return [{key: value for key, value in line.items() if key.startswith(wanted)} for line in steps]


PARTS: dict[str, Callable[[Any, Any], dict[str, Any]]] = {
    "paths": lambda own, objective: {
        "ppo.advantage": {"kind": f"{__name__}:{own.__name__}", "factor": 3.0},
        "ppo.policy_loss": {"objective": {"kind": f"{__name__}:{objective.__name__}", "scale": 2.0}},
    },
    "classes": lambda own, objective: {
        "ppo.advantage": {"kind": own, "factor": 3.0},
        "ppo.policy_loss": {"objective": {"kind": objective, "scale": 2.0}},
    },
    "instances": lambda own, objective: {
        "ppo.advantage": own(factor=3.0),
        "ppo.policy_loss": {"objective": objective(scale=2.0)},
    },
}


def test_an_estimator_and_an_objective_of_ones_own_train_a_run_however_they_are_given(inputs, tmp_path) -> None:
    found = {
        name: numbers(made(inputs, tmp_path / name, parts(TimesConfig, UnclippedConfig)))
        for name, parts in PARTS.items()
    }
    assert found["paths"] == found["classes"] == found["instances"]
    plain = numbers(made(inputs, tmp_path / "plain", {"ppo.advantage": "group_centred"}))
    assert found["paths"][0]["advantage/std"] == pytest.approx(3 * plain[0]["advantage/std"])
    assert found["paths"] != plain


def test_a_shipped_section_may_be_an_object_too(inputs, tmp_path) -> None:
    recipe = made(inputs, tmp_path / "run", {"ppo.advantage": GAEConfig(gae_lambda=0.5)}).recipe
    assert recipe.model_dump()["ppo"]["advantage"] == GAEConfig(gae_lambda=0.5).model_dump()


def test_the_run_says_its_class_and_refuses_to_go_on_with_another_source(inputs, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = (
        "from proximo.config.ppo.advantage import GroupCentredConfig\n\n\nclass Mine(GroupCentredConfig):\n    pass\n"
    )
    (tmp_path / "an_estimator.py").write_text(source)
    changes = {"ppo.advantage": "an_estimator:Mine", "run.save_every_steps": 1}
    training = made(inputs, tmp_path / "run", changes)
    assert "an_estimator:Mine" in training.dry_run()
    training.fit(quiet=True)
    saved = json.loads((tmp_path / "run" / "config.resolved.json").read_text())
    assert saved["ppo"]["advantage"]["kind"] == "an_estimator:Mine"
    made(inputs, tmp_path / "run", changes | {"ppo.num_steps": 3}).fit(quiet=True, resume="must")
    (tmp_path / "an_estimator.py").write_text(f"{source}    # changed\n")
    with pytest.raises(RunFolderError, match="an_estimator:Mine"):
        made(inputs, tmp_path / "run", changes | {"ppo.num_steps": 4}).fit(quiet=True, resume="must")


def test_a_stage_with_ones_own_goes_to_other_ranks_as_plain_values(inputs, tmp_path) -> None:
    recipes = [made(inputs, tmp_path / "run", PARTS["paths"](TimesConfig, UnclippedConfig)).recipe for _ in range(2)]
    assert recipes[0] == recipes[1]
    values = pickle.loads(pickle.dumps(resolved_values(recipes[0], tmp_path)))
    assert type(recipes[0]).model_validate(values) == recipes[0]


@pytest.mark.parametrize(
    ("given", "pieces"),
    [
        ("nowhere_at_all:Mine", ["subclass of AdvantageConfig", "nowhere_at_all cannot be imported"]),
        (f"{__name__}:Missing", [f"{__name__} has no Missing"]),
        (AdvantageConfig, ["subclass of AdvantageConfig", "is <class"]),
        (f"{__name__}:UnclippedConfig", ["subclass of AdvantageConfig", "UnclippedConfig"]),
        ({"kind": f"{__name__}:TimesConfig", "factr": 2}, ["ppo.advantage", "factr is not a known key", "factor"]),
        ({"kind": f"{__name__}:TimesConfig", "factor": "x"}, ["ppo.advantage", "factor must be a valid number"]),
    ],
)
def test_a_class_that_does_not_fit_is_refused_in_words(inputs, tmp_path, given, pieces) -> None:
    with pytest.raises(ConfigError) as refusal:
        made(inputs, tmp_path / "run", {"ppo.advantage": given})
    assert all(piece in str(refusal.value) for piece in pieces), refusal.value
