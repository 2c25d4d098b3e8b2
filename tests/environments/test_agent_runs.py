"""Whole runs with agents that own their loop: from Python and by recipe, with OpenAI's client and with verifiers."""

import json
import os
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack, closing
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch

from builders import tiny_language_model, tiny_tokenizer
from fake_vllm import GENERATE, fake_servers
from ppo_trainers import all_weights
from proximo.config.environment import AgentEnvironmentConfig
from proximo.config.loader import load_recipe
from proximo.config.ppo.options import PPOConfig
from proximo.models.language import LanguageModel
from proximo.ppo.recipe import PPORecipe
from proximo.ppo.trainer import PPOTrainer
from proximo.rollout.vllm.engine import VLLMEngine
from proximo.rollout.vllm.server import VLLMServer
from proximo.run.loop import run_trainer
from proximo.run.make.environments import PythonAgent
from proximo.run.options import RunOptions

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
WITH_OPENAI = """
import os, sys
sys.path.append(os.environ.get("PROXIMO_TEST_OPENAI", ""))
from openai import AsyncOpenAI, BadRequestError


async def run(base_url, row, seed):
    async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
        messages = [{"role": "user", "content": "say a"}]
        said = []
        for _ in range(2):
            reply = await client.chat.completions.create(model="policy", messages=messages, temperature=0.2)
            said.append(reply.choices[0].message.content)
            messages += [{"role": "assistant", "content": said[-1]}, {"role": "user", "content": "more"}]
        try:
            await client.chat.completions.create(model="policy", messages=messages, n=2)
        except BadRequestError:
            said.append(said[0])
        whole = "".join(said[:2])
        return {"reward": whole.count("a") / max(1, len(whole)), "refusals": len(said) - 2}
"""


def with_http(base_url: str, row: Mapping[str, Any], seed: int) -> float:
    """Asks twice for the letter a, and is rewarded by its share."""
    messages = [{"role": "user", "content": "say a"}]
    whole = ""
    for _ in range(2):
        request = urllib.request.Request(f"{base_url}/chat/completions", json.dumps({"messages": messages}).encode())
        with urllib.request.urlopen(request) as reply:
            said = json.load(reply)["choices"][0]["message"]["content"]
        whole += said
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
    return whole.count("a") / max(1, len(whole))


def train(num_steps: int, num_prompts: int, **agent: Any) -> tuple[list[Mapping[str, float]], Any]:
    """The lines of a run, and its trainer."""
    config = PPOConfig(
        num_steps=num_steps,
        prompts_per_step=num_prompts,
        rollout={"max_new_tokens": 4},
        kl="none",
        policy_optimizer={"learning_rate": 1e-2},
        value_optimizer={"learning_rate": 1e-2},
    )
    given = PythonAgent(run=with_http, max_turns=4, max_tokens=96, **agent)
    model = tiny_language_model(hidden_size=32, intermediate_size=64, num_hidden_layers=1)
    trainer = PPOTrainer(model, tiny_tokenizer(), environment=given, config=config)
    assert trainer.environments is not None
    with closing(trainer.environments):
        return list(trainer.train(64)), trainer


@pytest.mark.soak
def test_an_agent_with_plain_http_learns() -> None:
    lines, _ = train(6, 32)
    scores = [line["score/mean"] for line in lines]
    assert scores[0] < 0.1
    assert scores[-1] > 0.2


def test_an_agent_asks_the_recorder_before_vllm_and_its_log_probs_are_the_learners() -> None:
    policy = LanguageModel(tiny_language_model())
    given = PythonAgent(run=with_http, max_turns=4, max_tokens=96)
    config = PPOConfig(prompts_per_step=3, rollout={"max_new_tokens": 4})
    with fake_servers(policy) as (fake,), ExitStack() as opened:
        engine = VLLMEngine([VLLMServer(fake.url)], policy, tiny_tokenizer(), eos_token_ids=[2])
        opened.callback(engine.close)
        made = PPOTrainer(policy, tiny_tokenizer(), environment=given, engine=engine, config=config)
        assert made.environments is not None
        opened.callback(made.environments.close)
        responses = made.generate(3)
        assert fake.counts[GENERATE] == 6
    for response in responses:
        own = made.roles.policy.logprobs([response])
        assert (len(response.episode.turns), response.episode.failure) == (2, None)
        assert (response.logprobs - own)[response.response_mask].abs().max() < 1e-5


def test_a_run_does_not_depend_on_how_many_programs_run_at_once_and_has_the_learners_log_probs() -> None:
    (few, one), (many, other) = train(2, 8, workers=3), train(2, 8, workers=8)
    assert [line["score/mean"] for line in few] == [line["score/mean"] for line in many]
    assert max(line["mismatch/max_abs_log_ratio"] for line in few) < 1e-5
    assert (few[-1]["environment/turns_mean"], few[-1]["environment/forks_mean"]) == (2.0, 0.0)
    assert torch.equal(all_weights(one.policy.model), all_weights(other.policy.model))


def recipe(place: Path, environment: Mapping[str, Any], *, tokenizer: Path, **ppo: Any) -> PPORecipe:
    return PPORecipe.model_validate(
        {
            "run": {"folder": str(place / "run"), "device": "cpu"},
            "model": {"config": MODEL},
            "tokenizer": {"path": str(tokenizer)},
            "environment": {"max_turns": 5, **environment},
            "ppo": {
                "num_steps": 2,
                "prompts_per_step": 4,
                "rollout": {"max_new_tokens": 4},
                "kl": "none",
                "policy_optimizer": {"learning_rate": 1e-2},
                **ppo,
            },
        }
    )


def example(name: str) -> PPORecipe:
    found = load_recipe("ppo", str(EXAMPLES / name), ()).recipe
    assert isinstance(found, PPORecipe)
    return found


def metrics_of(place: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (place / "run" / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("step")]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def test_the_example_of_an_agent_is_played(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    given = example("agent.yaml").environment
    assert isinstance(given, AgentEnvironmentConfig)
    assert run_trainer(recipe(tmp_path, given.model_dump(exclude_unset=True), tokenizer=tokenizer), RunOptions()) == 0
    lines = metrics_of(tmp_path)
    assert [line["environment/faults"] for line in lines] == [0, 0]
    assert lines[0]["environment/turns_mean"] > 1


@pytest.mark.skipif(
    not (find_spec("openai") or os.environ.get("PROXIMO_TEST_OPENAI")),
    reason="OpenAI's client is not installed; PROXIMO_TEST_OPENAI may name a folder of packages that has it",
)
def test_an_agent_with_the_client_of_openai_learns_by_a_recipe(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "agent.py").write_text(WITH_OPENAI)
    agent = {"kind": "agent", "path": f"{tmp_path}/agent.py:run", "num_rows": 32, "max_tokens": 96, "workers": 8}
    options = {"num_steps": 8, "prompts_per_step": 32, "value_optimizer": {"learning_rate": 1e-2}}
    assert run_trainer(recipe(tmp_path, agent, tokenizer=tokenizer, **options), RunOptions()) == 0
    lines = metrics_of(tmp_path)
    assert lines[0]["score/mean"] < 0.15
    assert mean(line["score/mean"] for line in lines[-2:]) > 0.3
    assert [line["environment/info/refusals"] for line in lines] == [1.0] * 8
    assert all(line["environment/faults"] == 0 for line in lines)


GUESS = """
import re
import verifiers.v1 as vf


class GuessData(vf.TaskData):
    number: int


class GuessTask(vf.Task[GuessData]):
    pass


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self):
        for number in range(1, 10):
            yield GuessTask(GuessData(number=number, prompt="guess 1 to 9"), self.config.task)


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessEnvConfig]):
    async def run(self, task, agents):
        won = 0.0
        async with agents.player.interaction(task) as it:
            segment = await it.turn()
            for _ in range(3):
                digits = re.findall("[1-9]", segment.last_reply)
                guess = int(digits[0]) if digits else 0
                if guess == task.data.number:
                    won = 1.0
                    break
                segment = await it.turn("higher" if guess < task.data.number else "lower")
        it.trace.record_reward("won", won, 1.0)


__all__ = ["GuessEnv", "GuessTaskset"]
"""


@pytest.mark.skipif(
    "PROXIMO_TEST_VERIFIERS" not in os.environ,
    reason="verifiers has an environment of its own: PROXIMO_TEST_VERIFIERS names its interpreter",
)
def test_an_environment_of_verifiers_plays_against_the_built_in_engine(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "guess_v1.py").write_text(GUESS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    given = example("verifiers.yaml").environment
    assert given is not None
    changes = {"python": os.environ["PROXIMO_TEST_VERIFIERS"], "num_rows": 9, "max_tokens": 200}
    environment = {**given.model_dump(exclude_unset=True), **changes}
    made = recipe(tmp_path, environment, tokenizer=tokenizer, num_steps=1, prompts_per_step=2)
    assert run_trainer(made, RunOptions()) == 0
    (line,) = metrics_of(tmp_path)
    assert line["environment/faults"] == 0
    assert line["environment/turns_mean"] > 1
    assert line["environment/info/won"] == line["score/mean"]
    assert line["mismatch/max_abs_log_ratio"] < 1e-5
