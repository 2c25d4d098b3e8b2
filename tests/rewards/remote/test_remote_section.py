"""The section of a remote reward: what reaches the client, what is refused, and a PPO run that is graded elsewhere."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from reward_services import ScriptedService, good, grades, reply

from proximo.cli import main
from proximo.commands.pipeline import run as pipeline
from proximo.commands.pipeline.recipe import PipelineRecipe
from proximo.config.rewards.sources import RemoteRewardConfig
from proximo.errors import ConfigError, DataError, TrainingError
from proximo.ppo import from_recipe
from proximo.rewards.protocol import checked_body
from proximo.rewards.remote import RemoteLimits, RemoteReward
from proximo.rewards.source import ClosableSource
from proximo.run.make import reward_sources
from proximo.run.make.reward_sources import build_source_without_model
from proximo.run.options import RunOptions
from run_outcomes import read_lines
from tiny_runs import changed, recipe_of
from tiny_runs import run as run_recipe


@pytest.fixture(autouse=True)
def one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are not sent again, so that a fault is counted at once."""
    monkeypatch.setattr(reward_sources, "RemoteLimits", partial(RemoteLimits, attempts=1))


def test_every_key_of_the_section_reaches_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TOKEN", "s3cret")
    limits: dict[str, Any] = {
        "responses_per_request": 3,
        "max_concurrent_requests": 5,
        "request_seconds": 7.0,
        "step_seconds": 11.0,
    }
    assert set(RemoteRewardConfig.model_fields) - set(limits) == {"kind", "name", "url", "token_env", "weight"}
    with ScriptedService(good) as service:
        config = RemoteRewardConfig(kind="remote", name="far", url=service.url, token_env="REWARD_TOKEN", **limits)
        source = build_source_without_model(config)
        assert isinstance(source, RemoteReward)
        assert isinstance(source, ClosableSource)
        source.close()
        assert source.name == "far"
        assert source.limits == RemoteLimits(**limits, attempts=1)
        assert b"Bearer s3cret" in service.requests[0]


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"url": "verifiers:8321"}, "is not a service address"),
        ({"url": "ftp://verifiers"}, "is not a service address"),
        ({"url": "http://"}, "is not a service address"),
        ({"url": "http://verifiers:port"}, "not a service address"),
        ({"url": "http://verifiers:99999"}, "not a service address"),
        ({"url": "http://[::1"}, "not a service address"),
        ({"url": "http://verifiers/a b"}, "is not a service address"),
        ({"url": "http://verifiers/?token=x"}, "after '\\?' or '#'"),
        ({"url": "http://me:hunter2@verifiers"}, "contains a user or password"),
        ({"token_env": "sk-hunter2"}, "token_env is the name of an environment variable"),
        ({"request_seconds": 20, "step_seconds": 10}, r"request_seconds \(20\) must not exceed step_seconds \(10\)"),
    ],
)
def test_what_is_no_service_is_refused_without_a_secret_in_the_reason(keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem) as caught:
        RemoteRewardConfig.model_validate({"kind": "remote", "url": "http://verifiers:8321", **keys})
    assert "hunter2" not in caught.value.errors()[0]["msg"]


@pytest.mark.parametrize(
    "url", ["http://localhost:8321", "https://verifiers/rewards/", "http://[::1]:1", "http://10.0.0.1"]
)
def test_what_is_an_address(url: str) -> None:
    assert RemoteRewardConfig(kind="remote", url=url).url == url


@pytest.mark.parametrize("value", [None, "", "  ", "two words", "line\nbreak", "naïve"])
def test_a_variable_without_a_token_is_named_and_not_shown(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REWARD_TOKEN", raising=False)
    if value is not None:
        monkeypatch.setenv("REWARD_TOKEN", value)
    config = RemoteRewardConfig(kind="remote", url="http://127.0.0.1:9", token_env="REWARD_TOKEN")
    with pytest.raises(ConfigError, match="the environment variable REWARD_TOKEN") as caught:
        build_source_without_model(config)
    assert not value or value not in str(caught.value)


def recipe_with(inputs: Path, folder: Path, url: str, **more: Any) -> Any:
    source = {"kind": "remote", "url": url, "responses_per_request": 1}
    changes = {"run.folder": str(folder), "value": {"init_from": "policy"}, "reward": [source], **more}
    return changed(recipe_of("ppo", inputs), changes)


def test_a_run_is_graded_elsewhere_and_says_how_that_went_and_no_token(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REWARD_TOKEN", "s3cret-t0ken")
    refusals = iter([*[False] * 4, True])

    def mostly_good(connection: Any, count: int) -> None:
        bad = next(refusals, False)
        reply(b"", "500 No")(connection, count) if bad else reply(grades([0.5] * count))(connection, count)

    with ScriptedService(mostly_good) as service:
        changes = {"ppo.guards.max_unscored_fraction": 1.0, "reward.0.token_env": "REWARD_TOKEN"}
        recipe = recipe_with(inputs, tmp_path / "run", service.url, **changes)
        assert run_recipe("ppo", recipe, RunOptions(quiet=True)) == 0
        assert all(b"s3cret-t0ken" in request for request in service.requests)
    for path in (tmp_path / "run").rglob("*"):
        assert not path.is_file() or b"s3cret-t0ken" not in path.read_bytes(), path
    assert json.loads((tmp_path / "run" / "config.resolved.json").read_text())["reward"][0]["token_env"]
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    failed = [line["source/remote/failure_fraction"] for line in lines if "source/remote/failure_fraction" in line]
    assert sum(share > 0 for share in failed) == 1
    assert sum(line.get("response/unscored", 0) for line in lines) <= 1
    assert all(line["source/remote/seconds_p50"] > 0 for line in lines if "source/remote/seconds_p50" in line)
    assert {line["score/remote/mean"] for line in lines if line.get("score/remote/mean") is not None} == {0.5}


def test_a_row_that_the_service_could_not_score_stops_the_run_before_a_model_is_loaded(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(from_recipe, "build_language_model", lambda *_, **__: pytest.fail("a model was loaded"))
    said = r"^p.jsonl, row 2: no tests \(reported by the service of reward source 'remote'\)"
    with ScriptedService(good, check=reply(checked_body("p.jsonl, row 2: no tests"))) as service:
        recipe = recipe_with(inputs, tmp_path / "run", service.url)
        with pytest.raises(DataError, match=said):
            run_recipe("ppo", recipe, RunOptions(quiet=True))
    assert not (tmp_path / "run").exists()


def test_a_service_that_is_not_there_is_a_mistake_of_the_recipe_and_of_no_dry_run(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(from_recipe, "build_language_model", lambda *_, **__: pytest.fail("a model was loaded"))
    with ScriptedService(good) as service:
        url = service.url
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps(recipe_with(inputs, tmp_path / "run", url)))
    assert main(["ppo", str(recipe), "--dry-run"]) == 0
    capsys.readouterr()
    assert main(["ppo", str(recipe)]) == 2
    assert f"no reward service answers at {url}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_pipeline_asks_its_services_before_its_first_stage(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "run_trainer", lambda *_: pytest.fail("a stage began"))
    with ScriptedService(good) as service:
        source = {"kind": "remote", "url": service.url}
    recipe = {
        "run": {"folder": str(tmp_path / "run")},
        "sft": {key: part for key, part in recipe_of("sft", inputs).items() if key != "run"},
        "ppo": {key: part for key, part in recipe_with(inputs, tmp_path, "http://x").items() if key != "run"},
    }
    for watched in ({"reward": [source]}, {"gold": source, "reward": [{"kind": "function", "function": "math:sqrt"}]}):
        asking = PipelineRecipe.model_validate({**recipe, "ppo": recipe["ppo"] | watched})
        with pytest.raises(ConfigError, match="no reward service answers"):
            pipeline.run_pipeline(asking, RunOptions(quiet=True))


def test_a_service_that_is_gone_stops_the_run_by_the_rate_of_faults_and_not_by_hanging(
    inputs: Path, tmp_path: Path
) -> None:
    with ScriptedService(good, reply(b"", "500 No")) as service:
        recipe = recipe_with(inputs, tmp_path / "run", service.url)
        with pytest.raises(TrainingError, match="max_unscored_fraction"):
            run_recipe("ppo", recipe, RunOptions(quiet=True))
