"""Agents that own their loop: programs in worker processes and functions in threads, played with a stand-in of a model.

The model of these tests answers `a` to `e` and then ends; what it draws depends on what it read, and on the position.
"""

import json
import os
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from builders import tiny_tokenizer
from proximo.environments import recorder
from proximo.environments.agents import AgentArena, model_server
from proximo.environments.engine import EnvironmentEngine, Limits
from proximo.environments.players.pool import EnvironmentPool, Players
from proximo.environments.players.processes import ProcessPlayers
from proximo.environments.players.threads import ThreadPlayers
from proximo.environments.programs import WATCH_SECONDS, CommandAgent, FunctionAgent, ended, variables
from proximo.environments.turn_renderer import TurnRenderer
from proximo.errors import ConfigError, TrainingError
from proximo.records import Finish, Prompt, Response
from proximo.rollout.sampling import RandomKey, SamplingOptions
from proximo.rollout.session import CallRequest, ModelCall
from waiting import LATEST_SECONDS, wait_until

EOS = 2
FIRST = 6
"""The id of `a`."""


class DrawingSession:
    """A session without a model: one letter that its prompt and position decide, then the end."""

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._running: list[CallRequest] = []
        self.forgotten: list[Hashable] = []
        self.is_held = False
        """Answers nothing."""

    @property
    def num_running(self) -> int:
        return len(self._running)

    def submit(self, request: CallRequest) -> None:
        with self._arrived:
            self._running.append(request)
            self._arrived.notify()

    def advance(self, wait_seconds: float) -> list[ModelCall]:
        with self._arrived:
            self._arrived.wait_for(lambda: self._running and not self.is_held, wait_seconds)
            if self.is_held:
                return []
            ended, self._running = self._running, []
        return [self._call(request) for request in ended]

    def forget(self, lane: Hashable) -> None:
        self.forgotten.append(lane)

    def _call(self, request: CallRequest) -> ModelCall:
        letter = FIRST + (sum(request.token_ids) + request.stream + 7 * request.first_position) % 5
        tokens = (letter, EOS)[: request.max_new_tokens]
        return ModelCall(
            request=request,
            token_ids=tokens,
            logprobs=(-1.0,) * len(tokens),
            finish=Finish.EOS if len(tokens) == 2 else Finish.LENGTH,
            versions=((0, 0),),
        )


class SessionEngine:
    """An engine that does nothing but open sessions."""

    max_logprob_error = None
    thread_safe = True

    def __init__(self) -> None:
        self.opened = DrawingSession()

    @contextmanager
    def session(self, options: SamplingOptions, *, max_tokens: int) -> Iterator[DrawingSession]:
        yield self.opened

    def stop(self) -> None:
        pass


@contextmanager
def playing(players: Players, *, workers: int = 4, seconds: float = LATEST_SECONDS, **limits: Any) -> Iterator[Any]:
    """An engine whose agents are these players."""
    server = model_server(TurnRenderer(tiny_tokenizer()), max_tokens=64, host="127.0.0.1", token=None)
    arena = AgentArena(
        environments=EnvironmentPool(players, name="agent", workers=workers, timeout_seconds=seconds),
        renderer=TurnRenderer(tiny_tokenizer()),
        limits=Limits(**{"max_tokens": 64} | limits),
        server=server,
    )
    try:
        yield arena.engine(SessionEngine())
    finally:
        arena.close()


def functions(run: Callable[..., Any]) -> Players:
    return ThreadPlayers(lambda: FunctionAgent(run))


def play(engine: EnvironmentEngine, *, num_rows: int = 1, num_samples: int = 1) -> list[Response]:
    return engine.generate(
        [Prompt(id=f"row-{number}", token_ids=(), metadata={"word": "abc"[number]}) for number in range(num_rows)],
        num_samples=num_samples,
        options=SamplingOptions(max_new_tokens=8),
        key=RandomKey(seed=0, purpose="rollout", step=0),
    )


def ask(base_url: str, messages: Sequence[Mapping[str, str]], **options: Any) -> str:
    """What the model answers, asked without any library."""
    body = json.dumps({"model": "policy", "messages": messages, **options}).encode()
    request = urllib.request.Request(f"{base_url}/chat/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=LATEST_SECONDS) as reply:
            return json.load(reply)["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as error:
        error.close()  # it holds the socket
        raise


def two_turns(base_url: str, row: Mapping[str, str], seed: int) -> Any:
    """Asks twice, and is rewarded for the letters that it gets."""
    messages = [{"role": "user", "content": row["word"]}]
    said = ask(base_url, messages)
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
    return {"reward": ord(said) + ord(ask(base_url, messages)) / 1000, "seed": seed}


def test_a_program_becomes_a_trajectory_with_its_reward_on_the_last_turn() -> None:
    with playing(functions(two_turns)) as engine:
        responses = play(engine, num_rows=2, num_samples=2)
    assert [(each.prompt.id, each.sample_index) for each in responses] == [
        ("row-0", 0),
        ("row-0", 1),
        ("row-1", 0),
        ("row-1", 1),
    ]
    for response in responses:
        said = [turn.text for turn in response.episode.turns]
        assert response.episode.turns[-1].reward == ord(said[0]) + ord(said[1]) / 1000
        assert response.episode.turns[0].reward == 0.0
        assert (response.finish, response.forks) == (Finish.TERMINATED, ())
        assert (
            tiny_tokenizer().decode(response.prompt.token_ids)
            == f"<|user|>{response.prompt.metadata['word']}<eos><|assistant|>"
        )
        assert response.response_mask.tolist() == [True] * 2 + [False] * 7 + [True] * 2
    seeds = [response.episode.info["seed"] for response in responses]
    assert seeds[0] == seeds[1] != seeds[2]


@pytest.mark.parametrize("workers", [1, 3])
def test_trajectories_do_not_depend_on_how_many_play_at_once(workers: int) -> None:
    with playing(functions(two_turns), workers=6) as engine:
        together = play(engine, num_rows=3, num_samples=2)
    with playing(functions(two_turns), workers=workers) as engine:
        apart = play(engine, num_rows=3, num_samples=2)
    assert [each.token_ids for each in together] == [each.token_ids for each in apart]
    assert len({each.token_ids for each in together}) > 1


def only(engine: EnvironmentEngine) -> Response:
    (response,) = play(engine)
    return response


def test_a_program_that_raises_has_no_reward() -> None:
    def run(base_url: str, row: Any, seed: int) -> float:
        ask(base_url, [{"role": "user", "content": "a"}])
        raise KeyError("lost")

    with playing(functions(run)) as engine:
        response = only(engine)
    assert response.finish is Finish.ABORTED
    assert "KeyError: 'lost'" in response.episode.failure
    assert len(response.token_ids) == 2


@pytest.mark.parametrize("answer", [None, "1", True, float("nan"), {"score": 1.0}])
def test_a_reward_that_is_no_number_is_a_fault(answer: Any) -> None:
    with pytest.raises(TypeError, match="an agent returns its reward, a finite number"):
        ended(answer)


def test_a_program_that_calls_nothing_is_a_fault() -> None:
    with playing(functions(lambda base_url, row, seed: 1.0)) as engine:
        response = only(engine)
    assert (response.finish, response.episode.failure) == (
        Finish.ABORTED,
        "agent: the program ended without a call of the model",
    )


@pytest.mark.parametrize(("gives_up", "reward"), [(False, 0.0), (True, 3.0)])
def test_a_limit_of_the_run_ends_a_trajectory_by_its_length(gives_up: bool, reward: float) -> None:
    def run(base_url: str, row: Any, seed: int) -> float:
        try:
            for _ in range(9):
                ask(base_url, [{"role": "user", "content": "a"}])
        except OSError:
            if not gives_up:
                raise
        return 3.0

    with playing(functions(run), max_turns=2) as engine:
        response = only(engine)
    assert (response.finish, response.episode.reward, response.episode.failure) == (Finish.LENGTH, reward, None)
    assert len(response.episode.turns) == 2


def test_an_agent_that_cut_its_episode_says_so() -> None:
    def run(base_url: str, row: Any, seed: int) -> Any:
        ask(base_url, [{"role": "user", "content": "a"}])
        return {"reward": 1, "truncated": True}

    with playing(functions(run)) as engine:
        assert only(engine).finish is Finish.TRUNCATED


def test_a_stop_ends_calls_that_wait_and_nobody_hangs() -> None:
    refused: list[int] = []

    def run(base_url: str, row: Any, seed: int) -> float:
        try:
            ask(base_url, [{"role": "user", "content": "a"}])
        except urllib.error.HTTPError as error:
            refused.append(error.code)
        return 1.0

    with playing(functions(run)) as engine:
        session = engine.inner.opened
        session.is_held = True
        failed: list[BaseException] = []

        def sample() -> None:
            try:
                play(engine, num_samples=2)
            except TrainingError as error:
                failed.append(error)

        thread = threading.Thread(target=sample)
        thread.start()
        wait_until(lambda: session.num_running == 2)
        engine.stop()
        thread.join(LATEST_SECONDS)
        assert len(failed) == 1
        wait_until(lambda: refused == [404, 404])
        session.is_held = False
        assert len(play(engine)) == 1


def test_a_program_that_calls_twice_at_once_has_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "HANDOVER_SECONDS", 0.01)
    engines: list[Any] = []

    def run(base_url: str, row: Any, seed: int) -> float:
        session, asked = engines[0].inner.opened, [{"role": "user", "content": "a"}]
        first = threading.Thread(target=ask, args=(base_url, asked))
        first.start()
        wait_until(lambda: session.num_running)
        with suppress(urllib.error.HTTPError):
            ask(base_url, asked)
        session.is_held = False
        first.join(LATEST_SECONDS)
        return 1.0

    with playing(functions(run)) as engine:
        engines.append(engine)
        engine.inner.opened.is_held = True
        response = only(engine)
    assert response.finish is Finish.ABORTED
    assert "client: two clients called the model at once" in response.episode.failure


PROGRAM = """
import json, os, sys, urllib.request
asked = json.load(sys.stdin)
body = json.dumps({"messages": [{"role": "user", "content": asked["row"]["word"]}]}).encode()
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
request = urllib.request.Request(os.environ["BASE_URL"] + "/chat/completions", body, headers)
said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print("said", said)
print(json.dumps({"reward": ord(said), "turns": 1}))
"""


FLOOD = "while True: print('x' * 1_000_000, file=sys.{})"


def commands(*lines: str) -> Players:
    program = PROGRAM + "\n".join(lines)
    options = {"command": [sys.executable, "-c", program]}
    return ProcessPlayers("proximo.environments.programs:CommandAgent", options, memory_bytes=None, name="agent")


def test_a_command_may_read_a_large_row_late() -> None:
    program = f"import sys, time; time.sleep({2 * WATCH_SECONDS}); print(len(sys.stdin.read()))"
    agent = CommandAgent([sys.executable, "-c", program])
    agent.reset(seed=0, row={"text": "x" * 1_000_000})
    assert agent.step(json.dumps({"base_url": "http://localhost", "api_key": "none"}))[1] > 1_000_000


def test_a_command_prints_its_reward() -> None:
    with playing(commands()) as engine:
        response = only(engine)
    assert response.episode.reward == ord(response.episode.turns[0].text)
    assert response.episode.info["turns"] == 1
    assert response.finish is Finish.TERMINATED


@pytest.mark.parametrize(
    ("line", "failure"),
    [
        ("sys.exit('no luck')", "error: step() raised RuntimeError: the program ended with status 1: no luck"),
        ("print('great')", "the last line that a program prints must be its reward, it is 'great'"),
        ("print('x' * 17_000_000)", "the program printed more than 16,777,216 bytes"),
        (FLOOD.format("stdout"), "the program printed more than 16,777,216 bytes"),
        (FLOOD.format("stderr"), "the program printed more than 16,777,216 bytes"),
    ],
)
def test_a_command_that_fails_has_no_reward(line: str, failure: str) -> None:
    with playing(commands(line)) as engine:
        response = only(engine)
    assert response.finish is Finish.ABORTED
    assert failure in response.episode.failure


def test_a_command_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    program = f"import subprocess; subprocess.run(['sleep', 'infinity'], check=False, env={{'MARK': '{tmp_path}'}})"
    options = {"command": [sys.executable, "-c", program, str(tmp_path)]}
    players = ProcessPlayers("proximo.environments.programs:CommandAgent", options, memory_bytes=None, name="agent")
    with playing(players, seconds=5.0) as engine:
        response = only(engine)
        assert "timeout: step() did not answer within timeout_seconds" in response.episode.failure
        wait_until(lambda: not processes_with(str(tmp_path)))


def processes_with(mark: str) -> list[Path]:
    """Processes that have a text in their command or their environment."""
    found = []
    for file in (*Path("/proc").glob("[0-9]*/cmdline"), *Path("/proc").glob("[0-9]*/environ")):
        with suppress(OSError):
            found += [file] if mark.encode() in file.read_bytes() else []
    return found


AGENT = """
import asyncio, json, os, urllib.request

async def run(base_url, row, seed):
    body = json.dumps({"messages": [{"role": "user", "content": row["word"]}]}).encode()
    assert os.environ["OPENAI_BASE_URL"] == base_url
    request = urllib.request.Request(base_url + "/chat/completions", body)
    reply = await asyncio.to_thread(urllib.request.urlopen, request)
    return len(json.load(reply)["choices"][0]["message"]["content"])
"""


def in_file(folder: Path) -> Players:
    options = {"path": f"{folder}/agent.py:run"}
    return ProcessPlayers("proximo.environments.programs:function_agent", options, memory_bytes=None, name="agent")


def test_a_function_in_a_file_is_played_in_processes(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    with playing(in_file(tmp_path)) as engine:
        responses = play(engine, num_rows=2, num_samples=2)
    assert [each.episode.reward for each in responses] == [1.0] * 4


def test_threads_share_no_variables_that_say_where_the_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "of the user")
    with playing(functions(two_turns)) as engine:
        play(engine)
    assert os.environ["OPENAI_API_KEY"] == "of the user"


def test_a_host_is_named_once_among_those_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "a.example,127.0.0.1")
    assert variables({"base_url": "http://127.0.0.1:80/v1", "api_key": "none"})["NO_PROXY"] == "a.example,127.0.0.1"


def test_a_function_that_cannot_be_called_so_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("def run(url): ...")
    with pytest.raises(ConfigError, match=r"is called as run\(base_url=\.\.\., row=\.\.\., seed=\.\.\.\), but"):
        in_file(tmp_path)
