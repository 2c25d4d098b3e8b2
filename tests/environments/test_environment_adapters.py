"""Environments of other packages, unchanged, each played by the section of a recipe in worker processes."""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import Any

import pytest
from pydantic import TypeAdapter

import example_environments
from builders import tiny_language_model, tiny_tokenizer
from chat_families import FAMILIES
from played_environments import FakeEngine, FakeSession, play
from proximo.config.environment import EnvironmentConfig, WorkerEnvironmentConfig
from proximo.config.ppo.options import PPOConfig
from proximo.environments.adapters.tools import tools_of
from proximo.environments.engine import EnvironmentEngine
from proximo.environments.environment import EnvironmentFault, EnvironmentStep
from proximo.environments.players.player import environment_maker
from proximo.environments.players.pool import EnvironmentPool, Players
from proximo.environments.players.processes import ProcessPlayers
from proximo.environments.players.threads import ThreadPlayers
from proximo.environments.prompts import given_prompts
from proximo.errors import ConfigError
from proximo.ppo.trainer import PPOTrainer
from proximo.rewards.function import FunctionReward
from proximo.rollout.rank_transfers import from_bytes, to_bytes
from proximo.rollout.session import ModelCall
from proximo.run.make.environments import PythonEnvironment
from waiting import wait_until

Played = list[EnvironmentStep]


@pytest.fixture
def played() -> Iterator[Callable[..., Played]]:
    """Plays one episode in the environment of a section, with these texts: the steps of an environment."""
    pools: dict[str, EnvironmentPool] = {}

    def play(section: Mapping[str, Any], *texts: str, row: Mapping[str, Any] | None = None, seed: int = 5) -> Played:
        if (name := repr(section)) not in pools:
            pools[name] = EnvironmentPool(players_of(section), name="e", workers=1, timeout_seconds=120.0)
        pool = pools[name]
        pool.start(0, seed=seed, row=row or {})
        steps = [answered(pool)]
        for text in texts:
            assert not steps[-1].terminated
            pool.step(0, text)
            steps.append(answered(pool))
        pool.stop(0)
        return steps

    yield play
    for pool in pools.values():
        pool.close()


def players_of(section: Mapping[str, Any]) -> Players:
    """In processes; threads for tools, whose schemas need a library that takes seconds to import."""
    config: WorkerEnvironmentConfig = TypeAdapter(EnvironmentConfig).validate_python(section)
    path, options = config.made_by("hermes")
    if config.kind == "tools":
        return ThreadPlayers(environment_maker(path, options))
    return ProcessPlayers(path, options, memory_bytes=None)


def answered(pool: EnvironmentPool) -> EnvironmentStep:
    answers: list[tuple[int, EnvironmentStep | EnvironmentFault]] = []
    wait_until(lambda: answers.extend(pool.poll(1.0)) or answers)
    ((_, answer),) = answers
    assert isinstance(answer, EnvironmentStep), answer
    return answer


COUNTER = {"kind": "tools", "path": "example_environments:Counter", "kwargs": {"step": 2}}


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_public_methods_are_tools_and_the_last_turn_calls_none(played: Any) -> None:
    row = {"prompt": [{"role": "system", "content": "Count."}, {"role": "user", "content": "Go on."}], "start": 4}
    first, added, read, done = played(
        COUNTER,
        call("add", '{"number": 3}'),
        f"I look. {call('read', '{}')}" + call("add", '{"number": 1}'),
        "Bye",
        row=row,
    )
    assert first.observation == [row["prompt"][0], {"role": "user", "content": "Go on. It is 4 now."}]
    assert [tool["function"]["name"] for tool in first.info["tools"]] == ["add", "read"]
    assert first.info["tools"][0]["function"]["parameters"]["properties"]["number"]["type"] == "integer"
    (result,) = added.observation
    assert (result["role"], result["name"], result["content"]) == ("tool", "add", "10")
    assert [each["content"] for each in read.observation] == ['{"total": 10}', "12"]
    assert [step.reward for step in (added, read, done)] == pytest.approx([1.0, 0.2, 0.0])
    assert [step.info.get("tool_calls") for step in (added, read, done)] == [1, 2, 0]
    assert (read.terminated, done.terminated, done.truncated) == (False, True, False)


def test_a_call_that_fails_or_cannot_be_read_is_told_to_the_policy(played: Any) -> None:
    _, refused, malformed, unknown = played(
        COUNTER, call("add", '{"number": -1}'), call("add", "{"), call("_hidden", "{}"), row={"prompt": "Count."}
    )
    assert refused.observation[0]["content"] == "Error: ValueError: only upwards"
    assert malformed.info == {"tool_calls": 0, "malformed_calls": 1}
    assert "could not be read" in malformed.observation[0]["content"]
    assert unknown.info == {"tool_calls": 0, "malformed_calls": 1}
    assert "there is no tool '_hidden', only add, read" in unknown.observation[0]["content"]
    assert not unknown.terminated


def test_a_class_that_cannot_be_given_to_the_policy_is_named(played: Any) -> None:
    for name, said in (("Undescribed", "tool 'guess'.*cannot be described"), ("NoTools", "further public methods")):
        with pytest.raises(ConfigError, match=said):
            played({"kind": "tools", "path": f"example_environments:{name}"})


def test_a_class_of_tools_may_have_bound_arguments_and_static_methods_and_be_no_function() -> None:
    with pytest.raises(ConfigError, match=r"^environment '<lambda>' is no class.*functools\.partial"):
        tools_of(lambda: example_environments.Counter(2), "hermes", {})
    environment = tools_of(partial(example_environments.Counter, 2), "hermes", {})()
    asyncio.run(environment.reset(0, {}))
    assert asyncio.run(environment.step(call("add", '{"number": 3}')))[1] == pytest.approx(0.6)
    _, info = asyncio.run(tools_of(example_environments.Unrewarded, "hermes", {})().reset(0, {"start": 1}))
    assert info["tools"][0]["function"]["parameters"]["required"] == ["number"]


def test_a_class_of_tools_that_is_given_as_another_kind_is_told_how_to_give_it() -> None:
    with pytest.raises(ConfigError, match=r"no method step\(text\); .*kind: tools.*PythonEnvironment\(make=..., tools"):
        trainer(example_environments.Counter)


def test_an_episode_needs_a_reward_in_python_too() -> None:
    played = trainer(PythonEnvironment(make=example_environments.Unrewarded, tools=True, max_tokens=2000))
    rows = [{"prompt": "Count.", "start": 4}] * 2
    with pytest.raises(ConfigError, match=r"no reward: pass reward= .*a class of tools may have get_reward\(\)"):
        played.train(rows)
    with pytest.raises(ConfigError, match="no reward: pass reward="):
        played.train(rows, reward=[])
    (line,) = played.train(rows, reward=lambda completions: [float(len(each)) for each in completions])
    assert line["score/mean"] == 1.0


class Spoken(FakeSession):
    """A session whose turns are given as texts."""

    def __init__(self, tokenizer: Any, texts: list[str]) -> None:
        super().__init__()
        self.turns = [tokenizer(text + tokenizer.eos_token, add_special_tokens=False)["input_ids"] for text in texts]

    def advance(self, wait_seconds: float) -> list[ModelCall]:
        asked, _ = self._running.popleft()
        return [self._call(asked, self.turns.pop(0))]


def test_a_reward_function_in_trls_form_reads_the_whole_episode() -> None:
    tokenizer = FAMILIES["chatml"].tokenizer()
    session = Spoken(tokenizer, ["I add. " + call("add", '{"number": 3}'), call("add", "{"), "It is 3."])
    arena = PythonEnvironment(make=example_environments.Counter, tools=True, max_tokens=2000).arena(tokenizer)
    with closing(arena):
        (response,) = play(EnvironmentEngine(FakeEngine(session), arena), given_prompts([{"prompt": "Count."}]))
    seen: list[Any] = []
    judge = FunctionReward(
        lambda prompts, responses, completions: [seen.extend((prompts, responses, *completions)) or 1]
    )
    judge.score(from_bytes(to_bytes([(0, response)]), [response.prompt])[0][1:])
    assert seen[:2] == [[[{"role": "user", "content": "Count."}]], ["It is 3."]]
    called, result, unread, told, last = json.loads(json.dumps(seen[2]))
    assert (called["role"], called["content"]) == ("assistant", "I add.")
    assert called["tool_calls"][0]["function"] == {"name": "add", "arguments": {"number": 3}}
    assert (result["role"], result["name"], result["content"]) == ("tool", "add", "3")
    assert unread == {"role": "assistant", "content": call("add", "{")}
    assert told["role"] == "tool"
    assert last == {"role": "assistant", "content": "It is 3."}


def trainer(environment: Any) -> PPOTrainer:
    return PPOTrainer(
        tiny_language_model(max_position_embeddings=2048),
        tiny_tokenizer(),
        environment=environment,
        config=PPOConfig(num_steps=1, prompts_per_step=2, num_minibatches=1, rollout={"max_new_tokens": 2}),
    )


FROZEN = {"kind": "gymnasium", "id": "FrozenLake-v1", "instructions": "0 left, 1 down, 2 right, 3 up\n"}


def test_gymnasium_is_played_in_numbers_and_shown_as_text(played: Any) -> None:
    pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    section = {**FROZEN, "kwargs": {"is_slippery": False, "render_mode": "ansi"}}
    moves = ["1", "down again: 1", "2", "-1", "1", "2", "2"]
    first, *steps = played(section, *moves)
    assert first.observation.startswith("0 left, 1 down, 2 right, 3 up\n\n\x1b[41mS\x1b[0mFFF\nFHFH\n")
    assert steps[3].observation == "Write a number from 0 to 3."
    assert steps[3].info == {"malformed_actions": 1}
    assert [step.reward for step in steps] == [0, 0, 0, 0, 0, 0, 1]
    assert steps[-1].terminated


def test_gymnasium_plays_texts_of_a_module_of_the_user(played: Any) -> None:
    pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    first, last = played({"kind": "gymnasium", "id": "gymnasium_texts:Password-v0"}, "sesame", row={"hint": "a seed"})
    assert first.observation == "Say the word, a seed"
    assert (last.observation, last.reward, last.terminated) == ("open", 1.0, True)
    with pytest.raises(ConfigError, match="the actions of Pendulum-v1 are Box.*, not texts or numbers"):
        played({"kind": "gymnasium", "id": "Pendulum-v1"})


def test_gem(played: Any) -> None:
    pytest.importorskip(
        "gem", reason="gem-llm is not installed; it pins other packages, and has an environment of its own"
    )
    section = {"kind": "gem", "id": "game:GuessTheNumber-v0-easy"}
    first, second = played(section, "\\boxed{5}", seed=2**40)
    assert "guess the number between 1 and 10" in first.observation
    assert "At turn 1, you guessed 5" in second.observation or second.reward == 1
    assert played(section, "\\boxed{5}", seed=2**40)[1].observation == second.observation
    assert played(section, "no number")[1].terminated


def test_textarena_for_one(played: Any) -> None:
    pytest.importorskip("textarena", reason="textarena is not installed")
    section = {"kind": "textarena", "id": "GuessTheNumber-v0"}
    first, second, third = played(section, "[3]", "[10]")
    assert "guess the number between 1 and 20" in first.observation
    assert second.observation == "[Player] [3]\n[GAME] The target number is higher."
    assert third.observation.startswith("[Player] [10]\n"), "what was shown before is not shown again"
    with pytest.raises(ConfigError, match="it cannot be made: "):
        played({"kind": "textarena", "id": "TicTacToe-v0"})


def test_textarena_against_an_opponent(played: Any) -> None:
    pytest.importorskip("textarena", reason="textarena is not installed")
    section = {"kind": "textarena", "id": "TicTacToe-v0", "opponent": "example_environments:first_free"}
    first, *steps = played(section, "[4]", "[8]", seed=1)
    assert "You are Player 1" in first.observation
    assert "Player 0 placed their symbol (O) in cell 0." in first.observation
    assert "cell 1" in steps[0].observation
    assert (steps[-1].reward, steps[-1].terminated) == (-1.0, True)
    assert "You are Player 0" in (first := played(section, seed=2)[0]).observation
    assert "placed" not in first.observation


def test_reasoning_gym(played: Any) -> None:
    gym = pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    section = {"kind": "reasoning_gym", "id": "basic_arithmetic", "kwargs": {"max_digits": 2}}
    (entry,) = gym.create_dataset("basic_arithmetic", seed=5, size=1, max_digits=2)
    for text, score in ((entry["answer"], 1.0), (f"<answer> {entry['answer']} </answer>, I think", 1.0), ("?", 0.0)):
        first, last = played(section, text)
        assert first.observation == entry["question"]
        assert (last.reward, last.terminated, last.info["correct"]) == (score, True, score)
    with pytest.raises(ConfigError, match="it cannot be made: .*unexpected keyword argument 'size_of'"):
        played({**section, "kwargs": {"size_of": 2}})


def test_what_a_scorer_of_reasoning_gym_cannot_read_is_a_wrong_answer(played: Any) -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    _, last = played({"kind": "reasoning_gym", "id": "prime_factorization"}, "no number")
    assert (last.reward, last.info["unreadable_answers"]) == (0.0, 1)


def test_skyrl_gym_makes_an_environment_for_each_row(played: Any) -> None:
    pytest.importorskip("skyrl_gym", reason="skyrl-gym is not installed")
    row = {"prompt": "2 + 2?", "reward_spec": {"ground_truth": "4"}, "extra_info": {"max_turns": 3}}
    section = {"kind": "skyrl_gym", "id": "gsm8k_multi_turn"}
    first, second, last = played(section, "Well", "#### 4", row=row)
    assert first.observation == [{"role": "user", "content": "2 + 2?"}]
    assert second.observation[0]["content"].startswith("Please provide")
    assert (last.reward, last.terminated, last.info) == (1.0, True, {"steps": 2})
    with pytest.raises(ConfigError, match="skyrl-gym has no environment 'gsm9k'; it has .*gsm8k"):
        played({"kind": "skyrl_gym", "id": "gsm9k"}, row=row)
