"""A vLLM server that restarts is waited for, as long as `engine.start_seconds` says, and what is waited for is said."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from builders import tiny_language_model, tiny_tokenizer
from fake_vllm import CUT, FakeVLLM
from proximo.errors import TrainingError
from proximo.http_client import HttpClient, UnansweredError
from proximo.models.language import LanguageModel
from proximo.records import Finish, Prompt, Response
from proximo.rollout.engine import push_weights
from proximo.rollout.sampling import RandomKey, SamplingOptions
from proximo.rollout.stopping import StopRules
from proximo.rollout.vllm import dispatch, server
from proximo.rollout.vllm.dispatch import FAILURES_IN_A_ROW, Dispatch, Job
from proximo.rollout.vllm.engine import VLLMEngine, VLLMOptions
from proximo.rollout.vllm.requests import Choice, _ended
from proximo.rollout.vllm.server import ServerLimits, VLLMServer

PROMPTS = [Prompt(id=f"p{n}", token_ids=tuple(range(5, 8 + n))) for n in range(4)]
GENERATE = "/inference/v1/generate"
ATTEMPTS = 3
"""Fewer than the requests that nobody takes."""
NUM_REFUSED = 10


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (dispatch, server):
        monkeypatch.setattr(module, "FIRST_PAUSE_SECONDS", 0.001)
        monkeypatch.setattr(module, "LONGEST_PAUSE_SECONDS", 0.002)


class Restarting:
    """A server that is gone from a moment on, and there again after `NUM_REFUSED` requests that nobody took."""

    def __init__(self, policy: LanguageModel, socket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.policy, self.socket = policy, str(socket)
        self.fakes = [FakeVLLM(policy, socket=self.socket)]
        self.url = self.fakes[0].url
        self.leaves_at: str | None = None
        """The path of the next request before which it goes."""
        self.num_refused = 0
        send = HttpClient.send

        def watched(client: HttpClient, method: Any, path: str, *arguments: Any, **named: Any) -> bytes:
            if path == self.leaves_at:
                self.leaves_at = None
                self.leave()
            try:
                return send(client, method, path, *arguments, **named)
            except UnansweredError as error:
                self.num_refused += error.connection == "none"
                if self.num_refused == NUM_REFUSED:
                    self.num_refused += 1
                    self.fakes.append(FakeVLLM(policy, socket=self.socket))
                raise

        monkeypatch.setattr(HttpClient, "send", watched)

    def close(self) -> None:
        self.fakes[-1].close()

    def leave(self) -> None:
        self.fakes[-1].fault = lambda *_: CUT
        self.fakes[-1].close()
        Path(self.socket).unlink()


@pytest.fixture
def policy() -> LanguageModel:
    return LanguageModel(tiny_language_model(seed=0, initializer_range=0.2))


@pytest.fixture
def restarting(
    policy: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Restarting, VLLMEngine]]:
    place = Restarting(policy, tmp_path / "server.sock", monkeypatch)
    limits = ServerLimits(max_concurrent_requests=1, start_seconds=600)
    engine = VLLMEngine(
        [VLLMServer(place.url, limits=limits)],
        policy,
        tiny_tokenizer(),
        eos_token_ids=[2],
        options=VLLMOptions(attempts=ATTEMPTS),
    )
    with ExitStack() as opened:
        opened.callback(place.close)
        opened.callback(engine.close)
        push_weights(engine, 1, dict(policy.trainable_parameters()))
        yield place, engine


def drawn(engine: VLLMEngine) -> list[Response]:
    key = RandomKey(seed=3, purpose="rollout", step=1)
    return engine.generate(PROMPTS, num_samples=1, options=SamplingOptions(max_new_tokens=6), key=key)


def test_a_rollout_waits_for_a_server_that_restarts_and_says_so(
    restarting: tuple[Restarting, VLLMEngine], caplog: pytest.LogCaptureFixture
) -> None:
    place, engine = restarting
    expected = [each.token_ids for each in drawn(engine)]
    place.leaves_at = GENERATE
    with caplog.at_level(logging.WARNING, logger="proximo.rollout"):
        assert [each.token_ids for each in drawn(engine)] == expected
    assert place.num_refused > NUM_REFUSED > ATTEMPTS
    assert place.fakes[-1].counts["/update_weights"] == 1, "the one that started anew was given the weights"
    away = [each for each in caplog.messages if "has not been reachable" in each]
    assert len(away) == 1, "once a minute"
    assert "waiting for it, at most 600 s (engine.start_seconds)" in away[0]
    assert any("answers again after" in each for each in caplog.messages)


@pytest.mark.parametrize("path", ["/pause?mode=keep", "/update_weights", "/resume"])
def test_a_push_waits_for_a_server_that_restarts_at_any_of_its_requests(
    path: str, restarting: tuple[Restarting, VLLMEngine], policy: LanguageModel
) -> None:
    place, engine = restarting
    place.leaves_at = path
    engine.load_weights(2, dict(policy.trainable_parameters()))
    held = engine.holds()
    assert held is not None
    assert held.version == 2
    assert place.num_refused > NUM_REFUSED
    assert not place.fakes[-1].is_paused


def absent(url: str, *, start_seconds: float) -> VLLMServer:
    return VLLMServer(url, limits=ServerLimits(max_concurrent_requests=1, start_seconds=start_seconds))


def test_a_wait_in_vain_ends_with_its_limit_and_the_server(tmp_path: Path) -> None:
    url = f"unix://{tmp_path}/nobody.sock"
    gone = absent(url, start_seconds=0.0)
    call: Dispatch[Any] = Dispatch([gone], [Job(home=0, ask=lambda each: each.weight_version())], attempts=1000)
    with pytest.raises(TrainingError, match=rf"for 0 s \(engine.start_seconds\), the last at {url}: ConnectError"):
        list(call.run())
    with pytest.raises(UnansweredError, match="ConnectError"):
        gone.waiting_for_it(gone.weight_version)
    gone.close()


def test_a_server_that_loses_every_connection_uses_up_the_attempts() -> None:
    """A response that ends the server each time must not end it for ever."""
    asked: list[int] = []

    def ask(_: Any) -> int:
        asked.append(1)
        raise UnansweredError("ReadError", connection="lost")

    fake: Any = SimpleNamespace(
        limits=ServerLimits(max_concurrent_requests=1),
        url="url",
        has_ended=lambda: False,
        last_words=lambda: "it runs",
        restart_if_ended=lambda: None,
    )
    call: Dispatch[int] = Dispatch([fake], [Job(home=0, ask=ask)], attempts=3)
    with pytest.raises(TrainingError, match="no usable response after 3 attempts"):
        list(call.run())
    assert len(asked) == 3


def fakes(count: int) -> Any:
    return [
        SimpleNamespace(
            limits=ServerLimits(),
            url=f"{index}",
            has_ended=lambda: False,
            restart_if_ended=lambda: None,
            absence=SimpleNamespace(is_under_way=False),
        )
        for index in range(count)
    ]


def test_a_server_that_answers_with_an_error_and_ends_is_asked_again_once_it_is_started() -> None:
    ends = iter([True, False])
    server = VLLMServer("http://127.0.0.1:9", restart=lambda: next(ends))
    errors = [UnansweredError("status 500"), UnansweredError("status 500")]

    def ask() -> str:
        raise errors.pop()

    with pytest.raises(UnansweredError, match="status 500"):
        server.waiting_for_it(ask)
    assert (errors, server.num_restarts) == ([], 1), "asked again after the restart, and not without one"
    server.close()


def test_every_server_that_has_ended_is_started_before_a_call_gives_up() -> None:
    ended = {0, 1}
    servers = fakes(2)
    servers[0].has_ended, servers[1].has_ended = lambda: 0 in ended, lambda: 1 in ended
    servers[1].restart_if_ended = lambda: ended.discard(1)
    call: Dispatch[Any] = Dispatch(servers, [Job(home=0, ask=str)], attempts=3)
    job = call._pick(0)
    assert job is not None
    call._put_back(job, 0, LOST)
    assert call._pick(1) is job


LOST = UnansweredError("ReadError", connection="lost")


def test_a_server_does_not_get_back_what_it_failed_at_while_another_one_works() -> None:
    jobs = [Job(home=0, ask=str) for _ in range(2)]
    call: Dispatch[Any] = Dispatch(fakes(2), jobs, attempts=3)
    hard, other = jobs
    assert call._pick(0) is hard
    call._put_back(hard, 0, LOST)
    assert call._pick(0) is other
    call._failures_in_a_row[0] = 0  # it answered
    assert call._pick(0) is None
    assert call._pick(1) is hard
    call._put_back(hard, 1, LOST)
    assert (call._pick(1), call._pick(0)) == (None, hard), "each had its turn"


def test_what_a_server_failed_at_goes_to_one_that_works() -> None:
    (job,) = jobs = [Job(home=0, ask=str)]
    call: Dispatch[Any] = Dispatch(fakes(3), jobs, attempts=3)
    call._failures_in_a_row = [0, FAILURES_IN_A_ROW, 0]
    assert call._pick(0) is job
    call._put_back(job, 0, LOST)
    assert job.home == 2
    call._failures_in_a_row[2] = 3 * FAILURES_IN_A_ROW
    assert call._pick(0) is job, "no other one works any more"


def test_a_push_that_ends_its_server_each_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers at first, so that it is not away for long; the wait has a limit of its own."""
    clock = iter(range(0, 10_000, 100))
    monkeypatch.setattr(server, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    target = absent("http://127.0.0.1:9", start_seconds=500)

    def load() -> None:
        target.absence.ended()
        raise UnansweredError("ReadError", connection="lost")

    with pytest.raises(UnansweredError, match="ReadError"):
        target.waiting_for_it(load)
    target.close()


NUM_TOKENS = 3000


class Taken:
    """Stop rules that keep every sequence of tokens that they are given."""

    def __init__(self, rules: StopRules) -> None:
        self._rules, self.given = rules, []  # kept, so that none has the identity of an earlier one
        self.options = rules.options

    def finish(self, token_ids: Any, **named: Any) -> Finish | None:
        if not any(token_ids is each for each in self.given):
            self.given.append(token_ids)
        return self._rules.finish(token_ids, **named)


def counted(count: list[int], decode: Callable[..., str]) -> Callable[..., str]:
    def counting(token_ids: Any, **named: Any) -> str:
        count.append(len(token_ids))
        return decode(token_ids, **named)

    return counting


@pytest.mark.parametrize("stop_strings", [(), ("aab",)])
def test_the_end_of_a_response_is_found_with_work_in_proportion_to_its_length(
    stop_strings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tiny_tokenizer()
    a, b = tokenizer.encode("ab", add_special_tokens=False)
    options = SamplingOptions(max_new_tokens=NUM_TOKENS, stop_strings=stop_strings)
    rules = Taken(StopRules(options=options, eos_token_ids={2}, tokenizer=tokenizer))
    decoded: list[int] = []
    monkeypatch.setattr(tokenizer, "decode", counted(decoded, tokenizer.decode))
    alternating = tuple([a, b] * (NUM_TOKENS // 2))  # every second one may complete the stop string, and none does
    choice = Choice(token_ids=alternating, logprobs=(0.0,) * NUM_TOKENS, weight_versions=())
    assert _ended(rules, choice, (), NUM_TOKENS) == (NUM_TOKENS, Finish.LENGTH)  # type: ignore[arg-type]
    assert sum(map(len, rules.given)) <= 2 * NUM_TOKENS, "tokens that were copied"
    assert sum(decoded) <= 20 * NUM_TOKENS, "tokens that were decoded"


def test_an_absence_is_said_at_once_and_each_minute_and_is_too_long_at_its_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [1000.0]
    monkeypatch.setattr(server, "time", SimpleNamespace(monotonic=lambda: now[0]))
    away = server.Absence("url", seconds=90)
    said: dict[float, tuple[int, bool]] = {}
    with caplog.at_level(logging.WARNING, logger="proximo.rollout"):
        for seconds in (0, 59, 60, 89, 90, 119, 120):
            now[0] = 1000.0 + seconds
            away.noticed("ConnectError")
            said[seconds] = len(caplog.messages), away.is_too_long
        away.ended()
    assert [count for count, _ in said.values()] == [1, 1, 2, 2, 2, 2, 3]
    assert [seconds for seconds, (_, too_long) in said.items() if too_long] == [90, 119, 120]
    assert caplog.messages[-1] == "the vLLM server url answers again after 120 s"
    assert not away.is_under_way
    assert not away.is_too_long
