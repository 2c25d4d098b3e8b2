"""The sources of kind maths and countdown as a recipe has them: built, asked through workers, refused."""

import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from inspect import signature
from typing import Any

import pytest
import torch
import yaml

import proximo.config.rewards.verifiers as config_module
from builders import tiny_tokenizer
from proximo.config.rewards.verifiers import AnswerScores, CountdownRewardConfig, MathsRewardConfig
from proximo.errors import ConfigError, DataError, MissingExtraError
from proximo.records import ScoreState
from proximo.rewards.verifier_reward import VerifierReward
from proximo.run.make.models import DeviceSpec, build_reward_source
from proximo.trainer_kinds import recipe_kind
from proximo_verifiers.maths.countdown import CountdownVerifier
from proximo_verifiers.maths.symbols import is_installed
from proximo_verifiers.maths.verifier import MathsVerifier
from recipe_files import PPO
from records_made import prompt, response
from waiting import LATEST_SECONDS


@contextmanager
def source(**section: Any) -> Iterator[VerifierReward]:
    """The source of a recipe with this section, with one worker."""
    section = {"workers": 1, **section}
    recipe = recipe_kind("ppo").schema.model_validate({**yaml.safe_load(PPO), "reward": [section]})
    device_spec = DeviceSpec(device=torch.device("cpu"), precision="float32", seed=0)
    built = build_reward_source(recipe.reward[0], tiny_tokenizer(), device_spec=device_spec, tokens_per_microbatch=100)
    assert isinstance(built, VerifierReward)
    try:
        yield built
    finally:
        built.close()


def test_sources_of_both_kinds_score_through_workers() -> None:
    asked = prompt(answer="\\frac12", metadata={"nums": [2, 3], "target": 6})
    texts = ("\\boxed{0.5}", "\\boxed{2}", "\\boxed{2 * 3}", "\\boxed{10^{10^{10}}}", "nothing")
    responses = [response(to=asked, text=text) for text in texts]
    with source(kind="maths", name="correct", symbolic="never", scores={"no_answer": -1.0}) as maths:
        found = maths.score(responses)
        assert maths.name == "correct"
    assert [each.score for each in found] == [1.0, 0.0, 0.0, 0.0, -1.0]
    assert [each.state for each in found[:3]] == [ScoreState.SCORED] * 3
    assert [each.state for each in found[3:]] == [ScoreState.MODEL_FAULT] * 2
    with source(kind="countdown", name="made", scores={"incorrect": 0.1, "no_answer": -1.0}) as countdown:
        found = countdown.score(responses)
        assert countdown.name == "made"
    assert [each.score for each in found] == [-1.0, 0.1, 1.0, -1.0, -1.0]


def test_a_row_that_cannot_be_graded_is_named_before_the_run() -> None:
    with source(kind="maths", symbolic="never") as maths, pytest.raises(DataError, match=r"row 7.*no.*`answer`"):
        maths.check_prompts([prompt("p7")], {"p7": "row 7"})
    with source(kind="countdown") as countdown, pytest.raises(DataError, match=r"row 7.*column 'nums'"):
        countdown.check_prompts([prompt("p7")], {"p7": "row 7"})


def test_a_pattern_that_never_ends_costs_a_worker_and_the_answer_its_score() -> None:
    section = {
        "answer_from": ["pattern"],
        "pattern": "((?:a+)+b)",
        "answer_seconds": 0.5,
        "scores": {"incorrect": -1.0},
    }
    with source(kind="maths", symbolic="never", **section) as maths:
        (endless,) = maths.score([response(to=prompt(answer="aab"), text="a" * 40)])
        maths._grader._pool._loop.limits = replace(maths._grader._pool._loop.limits, answer_seconds=LATEST_SECONDS)
        (quick,) = maths.score([response(to=prompt(answer="aab"), text="aab")])
    assert (endless.score, quick.score) == (-1.0, 1.0)
    assert endless.state is ScoreState.MODEL_FAULT
    assert "answer_seconds" in str(endless.reason)


@pytest.mark.skipif(is_installed(), reason="the extra maths is installed")
def test_always_without_the_extra_is_an_error_before_the_run() -> None:
    with pytest.raises(MissingExtraError, match=r"math-verify>=0.9"), source(kind="maths", symbolic="always"):
        pass


@pytest.mark.skipif(not is_installed(), reason="the extra maths is not installed")
def test_a_worker_asks_math_verify() -> None:
    options = {"symbolic": "always", "symbolic_cpu_seconds": 10.0}
    made = VerifierReward(MathsRewardConfig.implementation, name="maths", options=options, answer_seconds=60.0)
    with closing(made) as maths:
        (found,) = maths.score([response(to=prompt(answer="\\sin(2x)"), text="\\boxed{2 \\sin x \\cos x}")])
    assert (found.score, found.components["by_symbols"]) == (1.0, 1.0)


def test_what_is_done_without_is_said_once_when_the_source_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "find_spec", lambda name: None)
    with pytest.warns(UserWarning, match=r"'maths': the extra maths is not installed") as said, source(kind="maths"):
        pass
    assert len(said) == 1
    with warnings.catch_warnings(), source(kind="maths", symbolic="never"):
        pass


@pytest.mark.parametrize(
    ("section", "verifier"),
    [(MathsRewardConfig(kind="maths"), MathsVerifier), (CountdownRewardConfig(kind="countdown"), CountdownVerifier)],
)
def test_section_and_verifier_have_the_same_options_with_the_same_defaults(section: Any, verifier: type) -> None:
    defaults = {name: each.default for name, each in signature(verifier).parameters.items()}
    defaults.pop("symbolic_cpu_seconds", None)  # of programs alone
    options = section.verifier_options()
    assert {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()} == defaults


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": "a"}, "need each other"),
        ({"answer_from": ["pattern"]}, "need each other"),
        ({"answer_from": ["pattern"], "pattern": "("}, "not a regular expression"),
        ({"answer_from": []}, "at least 1"),
        ({"relative_tolerance": 0.0}, "relative_tolerance must be above 0"),
        ({"scores": {"correct": 0.0, "incorrect": 1.0}}, "must be above"),
        ({"scores": {"correct": 0.5, "no_answer": 0.5}}, "must be above"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MathsRewardConfig(kind="maths", **options)


def test_operators_are_some_of_four() -> None:
    with pytest.raises(ConfigError):
        CountdownRewardConfig(kind="countdown", operators=["**"])


@pytest.mark.parametrize("scores", [{"incorrect": 1.0}, {"no_answer": 1.0}, {"correct": 0.0, "incorrect": 1.0}])
def test_nothing_scores_as_much_as_a_right_answer(scores: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must be above"):
        AnswerScores(**scores)
