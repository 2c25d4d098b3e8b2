"""The sections of recipes for agents and for verifiers: what is refused before a model is loaded, and how."""

import json
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from builders import tiny_tokenizer
from proximo.config.environment import AgentEnvironmentConfig, VerifiersEnvironmentConfig
from proximo.environments.programs import VerifiersAgent
from proximo.errors import ConfigError
from proximo.run.make.environments import make_environments
from proximo.run.preflight import environment_inputs

AGENT = {"kind": "agent", "path": "agent.py:run"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"path": None}, "an agent is either a function, at path, or a command"),
        ({"command": ["a"]}, "an agent is either a function, at path, or a command"),
        ({"max_observation_tokens": 9}, "programs write their own messages: remove it"),
        ({"host": "10.0.0.1"}, "can be reached from other machines: name with token_env"),
        ({"host": "0.0.0.0", "token_env": "TOKEN"}, "is no address to call"),
        ({"token_env": "secret-token"}, "never the token itself"),
    ],
)
def test_sections_that_cannot_be_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        AgentEnvironmentConfig(**AGENT | changes)


def problems(config: Any) -> dict[str, str | None]:
    return {each.key: each.problem for each in environment_inputs(config, "environment")}


def test_what_a_program_needs_is_looked_for_before_models_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AGENT_TOKEN", raising=False)
    found = problems(AgentEnvironmentConfig(**AGENT | {"path": f"{tmp_path}/a.py:run", "token_env": "AGENT_TOKEN"}))
    assert "there is no file" in str(found["environment.path"])
    assert "AGENT_TOKEN is not set" in str(found["environment.token_env"])
    assert found["environment.kind"] is None
    command = AgentEnvironmentConfig(kind="agent", command=("no-such-program",))
    assert problems(command)["environment.command"] == "there is no program no-such-program"
    absent = VerifiersEnvironmentConfig(kind="verifiers", python="no-python", env={})
    assert problems(absent)["environment.python"] == "there is no interpreter no-python"
    for made in (command, absent):
        assert type(made)(**made.model_dump(mode="json")) == made, "a saved section is read again"


def test_a_token_that_can_be_guessed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_TOKEN", "short")
    config = AgentEnvironmentConfig(**AGENT | {"token_env": "AGENT_TOKEN"})
    with pytest.raises(ConfigError, match=r"environment\.token_env\) has 5 characters: it needs 16"):
        make_environments(config, tiny_tokenizer(), on_every_rank=True)


def test_a_process_of_verifiers_that_does_not_start_says_why(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'no module named verifiers' >&2\nexit 1\n")
    python.chmod(0o755)
    config = VerifiersEnvironmentConfig(kind="verifiers", python=str(python), env={"taskset": {"id": "guess_v1"}})
    with pytest.raises(ConfigError, match="ended before it was ready: no module named verifiers"):
        make_environments(config, tiny_tokenizer(), on_every_rank=True)


STAND_IN = """
class ModelContext: ...
class TrainClientConfig: ...
class Trace: ...
def resolve_env_config(given): return given
def load_environment(given): return type("Made", (), {"taskset": ["one", "two"]})
"""


def test_more_rows_than_a_taskset_has_are_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "verifiers" / "v1"
    (folder / "clients").mkdir(parents=True)
    (folder / "utils" / "loaders").mkdir(parents=True)
    for each in (tmp_path / "verifiers", folder, folder / "clients", folder / "utils", folder / "utils" / "loaders"):
        (each / "__init__.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    config = VerifiersEnvironmentConfig(kind="verifiers", python=sys.executable, env={}, num_rows=3)
    with pytest.raises(
        ConfigError, match=r"the taskset has 2 tasks, and environment\.num_rows is 3: set it to at most"
    ):
        make_environments(config, tiny_tokenizer(), on_every_rank=True)


def test_a_metric_of_verifiers_may_be_named_as_a_part_of_an_answer(tmp_path: Path) -> None:
    info = {"reward": 0.5, "truncated": 1.0, "won": 1.0}
    with socket.socket(socket.AF_UNIX) as bridge:
        bridge.bind(str(tmp_path / "bridge"))
        bridge.listen()

        def play() -> None:
            with bridge.accept()[0] as client:
                client.makefile("rb").readline()
                client.sendall(json.dumps({"reward": 2.0, "info": info}).encode() + b"\n")

        threading.Thread(target=play, daemon=True).start()
        agent = VerifiersAgent(str(tmp_path / "bridge"))
        agent.reset(seed=0, row={"episode": 0})
        where = {"base_url": "http://localhost/t/a/v1", "api_key": "none", "trajectory": "a"}
        assert agent.step(json.dumps(where)) == ("", 2.0, True, False, info)
