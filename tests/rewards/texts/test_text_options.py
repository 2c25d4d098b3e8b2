"""Every key of the sections that read texts reaches its verifier: with another value another grade comes out."""

import importlib
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import TypeAdapter

from proximo.config.rewards.kinds import WatchedSourceConfig
from proximo.config.rewards.verifiers import PatternRewardConfig, ThinkAnswerRewardConfig, VerifierRewardConfig
from proximo_verifiers.verifier import Answer, Grade

GOOD = "<think>a</think><answer>41</answer>"
PATTERN = {"kind": "pattern", "pattern": "a"}
CODE = {"kind": "code", "form": "asserts"}
WRONG = {"kind": "think_answer", "verifier": {"kind": "pattern", "pattern": "42"}}


@dataclass(frozen=True)
class Option:
    """A key with another value, what holds in both cases, and a text on which it shows."""

    name: str
    other: Any
    base: dict[str, Any]
    text: str


OPTIONS = [
    Option("pattern", "b", PATTERN, "a"),
    Option("match_score", 3, PATTERN, "a"),
    Option("no_match_score", -1, PATTERN, "b"),
    Option("verifier", {"kind": "pattern", "pattern": "41"}, WRONG, GOOD),
    Option("min_score", -1.0, WRONG, GOOD),
    Option("think_in_prompt", True, {"kind": "think_answer"}, GOOD),
]
SECTIONS: dict[str, type[VerifierRewardConfig]] = {
    "pattern": PatternRewardConfig,
    "think_answer": ThinkAnswerRewardConfig,
}


def grade(section: dict[str, Any], text: str) -> Grade:
    config = TypeAdapter(WatchedSourceConfig).validate_python(section)
    assert type(config) is SECTIONS[section["kind"]]
    module, _, name = config.verifier_path().partition(":")
    verifier = getattr(importlib.import_module(module), name)(**config.verifier_options())
    return verifier.grade(Answer(text=text, prompt="?"))


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: f"{option.base['kind']}.{option.name}")
def test_a_key_with_another_value_gives_another_grade(option: Option) -> None:
    assert grade({**option.base, option.name: option.other}, option.text) != grade(option.base, option.text)


def test_no_key_of_a_text_reward_is_left_out() -> None:
    shared = {*VerifierRewardConfig.model_fields}
    for kind, section in SECTIONS.items():
        shown = {option.name for option in OPTIONS if option.base["kind"] == kind}
        assert shown == set(section.model_fields) - shared, kind


@pytest.mark.parametrize("key", ["name", "weight", "workers"])
def test_what_holds_for_both_is_not_given_to_the_nested_verifier(key: str) -> None:
    own = {"name": "mine", "weight": 2.0, "workers": 3}[key]
    with pytest.raises(ValueError, match=f"whose {key} holds for both: move it out of verifier"):
        ThinkAnswerRewardConfig.model_validate({"kind": "think_answer", "verifier": {**PATTERN, key: own}})


@pytest.mark.parametrize("right", [PATTERN, {**CODE, "memory_mib": 8192, "cpu_seconds": 30}])
def test_a_verifier_has_the_worker_of_the_form_and_survives_being_written_down(right: dict[str, Any]) -> None:
    """As runs, pipelines and checkpoints write a recipe: with every key, the verifier's among them."""
    config = ThinkAnswerRewardConfig.model_validate({"kind": "think_answer", "answer_seconds": 700, "verifier": right})
    assert config.verifier is not None
    assert config.verifier.answer_seconds == 700
    assert config.memory_of_a_worker_mib == max(4096, right.get("memory_mib", 0))
    assert ThinkAnswerRewardConfig.model_validate(config.model_dump(mode="json")) == config
    made = TypeAdapter(WatchedSourceConfig).validate_python(right | {"answer_seconds": 700})
    assert ThinkAnswerRewardConfig(kind="think_answer", answer_seconds=700, verifier=made) == config  # ty: ignore
