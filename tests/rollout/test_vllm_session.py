"""Sessions of the vLLM engine: trajectories of several turns with servers, and what becomes of calls that fail."""

import threading
from collections.abc import Hashable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from architectures import build_architecture
from builders import tiny_tokenizer
from fake_vllm import GENERATE, FakeVLLM, Fault, fake_servers
from proximo.errors import TrainingError, UserError
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions
from proximo.records import Finish
from proximo.rollout.engine import push_weights
from proximo.rollout.sampling import SamplingOptions
from proximo.rollout.session import CallRequest
from proximo.rollout.vllm import dispatch, server
from proximo.rollout.vllm.engine import VLLMEngine, VLLMOptions
from proximo.rollout.vllm.server import ServerLimits, VLLMServer
from session_play import OPTIONS, Played, learners_logprobs, play, trajectories
from waiting import LATEST_SECONDS

OPEN = ExitStack()


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leaves no server behind, and waits little."""
    for module in (dispatch, server):
        monkeypatch.setattr(module, "FIRST_PAUSE_SECONDS", 0.01)
        monkeypatch.setattr(module, "LONGEST_PAUSE_SECONDS", 0.1)
    with OPEN:
        yield


def served(policy: LanguageModel, count: int = 1, fault: Fault | None = None, **limits: Any) -> VLLMEngine:
    fakes = OPEN.enter_context(fake_servers(policy, count, fault))
    servers = [VLLMServer(each.url, limits=ServerLimits(**limits)) for each in fakes]
    options = VLLMOptions(attempts=3, max_logprob_error=1e-3)
    engine = VLLMEngine(servers, policy, tiny_tokenizer(), eos_token_ids=[2, 17], options=options)
    OPEN.callback(engine.close)
    push_weights(engine, 1, dict(policy.trainable_parameters()))
    return engine


def policy_of(seed: int = 0) -> LanguageModel:
    return LanguageModel(build_architecture("llama", seed=seed))


def expect_learners(model: LanguageModel, played: list[Played]) -> None:
    for each, expected in zip(played, learners_logprobs(model, played), strict=True):
        found = torch.tensor([logprob for _, logprob in each.written])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_trajectories_are_those_of_the_policy_and_depend_on_nothing_else() -> None:
    policy = policy_of()
    played = play(served(policy, 2), trajectories(8, num_turns=4))
    expect_learners(policy, played)
    few = play(served(policy, 1, max_concurrent_requests=1), trajectories(8, num_turns=4))
    assert [each.ids for each in few] == [each.ids for each in played]
    streams = [call.token_ids for each in played for call in each.calls]
    assert len(set(streams)) > len(streams) / 2, "each turn has its own draws"


def test_an_adapter_serves_the_calls_that_begin_after_its_push() -> None:
    policy = policy_of().with_adapter(LoRAOptions(rank=2))
    engine = served(policy)

    def moved() -> None:
        with torch.no_grad():
            for _, tensor in policy.trainable_parameters():
                tensor.add_(0.3)
        push_weights(engine, 2, dict(policy.trainable_parameters()))

    first, _, second = trajectories(3, num_turns=1)
    with engine.session(OPTIONS, max_tokens=100) as session:
        session.submit(first.request())
        first.take(*session.advance(LATEST_SECONDS))
        expect_learners(policy, [first])
        moved()
        session.submit(second.request())
        second.take(*session.advance(LATEST_SECONDS))
        expect_learners(policy, [second])
    assert [each.calls[0].versions for each in (first, second)] == [((1, 0),), ((2, 0),)]


def test_weights_that_come_between_two_tokens_are_named() -> None:
    policy, later = policy_of(), policy_of(seed=1)
    fakes = OPEN.enter_context(fake_servers(policy, 1))
    engine = VLLMEngine([VLLMServer(fakes[0].url)], policy, tiny_tokenizer(), eos_token_ids=[])
    OPEN.callback(engine.close)
    push_weights(engine, 1, dict(policy.trainable_parameters()))
    arrived, pushed = threading.Event(), threading.Event()

    def wait(position: int) -> None:
        if position == 2:
            arrived.set()
            assert pushed.wait(LATEST_SECONDS)

    fakes[0].before_token = wait
    with engine.session(SamplingOptions(max_new_tokens=1), max_tokens=50) as session:
        asked = {"stream": 4, "first_position": 0, "max_new_tokens": 5}
        session.submit(CallRequest(id=0, lane=0, token_ids=(5, 6), **asked))
        assert arrived.wait(LATEST_SECONDS)
        push_weights(engine, 2, dict(later.trainable_parameters()))
        pushed.set()
        (call,) = session.advance(LATEST_SECONDS)
    assert (call.versions, call.finish) == (((1, 0), (2, 2)), Finish.LENGTH)


def test_a_server_that_fails_is_asked_again_and_counted() -> None:
    failures = [3]

    def fault(_: FakeVLLM, path: str, __: dict[str, Any]) -> Any:
        if path == GENERATE and failures[0]:
            failures[0] -= 1
            return 500
        return None

    policy = policy_of()
    engine = served(policy, 2, fault)
    expect_learners(policy, play(engine, trajectories(6, num_turns=2)))
    assert engine.statistics()["engine/retries"].value == 3


def test_a_restarted_server_gets_the_weights_again() -> None:
    policy = policy_of()
    fakes = OPEN.enter_context(fake_servers(policy_of(seed=3), 1))
    engine = VLLMEngine([VLLMServer(fakes[0].url)], policy, tiny_tokenizer(), eos_token_ids=[2])
    OPEN.callback(engine.close)
    push_weights(engine, 1, dict(policy.trainable_parameters()))
    fakes[0].restart()
    expect_learners(policy, play(engine, trajectories(3, num_turns=2)))


def test_an_error_ends_the_session_and_all_its_calls() -> None:
    engine = served(policy_of(), 1, lambda _, path, __: 400 if path == GENERATE else None)
    with engine.session(OPTIONS, max_tokens=60) as session:
        for each in trajectories(3, num_turns=1):
            session.submit(each.request())
        with pytest.raises(TrainingError, match="a vLLM server refused a request"):
            session.advance(LATEST_SECONDS)
        assert session.num_running == 0
        with pytest.raises(TrainingError, match="the session has ended: a vLLM server refused"):
            session.submit(trajectories(1, num_turns=1)[0].request())


def test_a_forgotten_lane_ends_without_a_result() -> None:
    waits = threading.Event()

    def fault(_: FakeVLLM, path: str, body: dict[str, Any]) -> Any:
        if path == GENERATE and body["token_ids"][0] == 9:
            assert waits.wait(LATEST_SECONDS)
        return None

    engine = served(policy_of(), 1, fault)
    with engine.session(OPTIONS, max_tokens=60) as session:
        for lane in (9, 5):
            asked = {"stream": 1, "first_position": 0, "max_new_tokens": 2}
            session.submit(CallRequest(id=lane, lane=lane, token_ids=(lane, 6), **asked))
        session.forget(9)
        waits.set()
        calls = []
        while session.num_running:
            calls += session.advance(LATEST_SECONDS)
        assert session.advance(0) == []
    assert [call.request.id for call in calls] == [5]


def test_a_lane_that_another_thread_forgets_meanwhile_has_a_home() -> None:
    class Forgotten(dict[Hashable, int]):
        def __contains__(self, lane: Hashable) -> bool:
            return self.pop(lane, None) is not None

    (played,) = trajectories(1, num_turns=1)
    with served(policy_of()).session(OPTIONS, max_tokens=100) as session:
        session._homes = Forgotten()
        assert [session._job(played.request()).home for _ in range(2)] == [0, 0]


def test_stopping_the_engine_ends_the_session() -> None:
    engine = served(policy_of())
    with engine.session(OPTIONS, max_tokens=60) as session:
        engine.stop()
        with pytest.raises(TrainingError, match="the engine was stopped while it sampled"):
            session.advance(LATEST_SECONDS)


def test_its_threads_end_with_it() -> None:
    engine = served(policy_of())
    play(engine, trajectories(4, num_turns=2))
    for thread in threading.enumerate():
        if thread.name == "vllm-requests":
            thread.join(LATEST_SECONDS)
            assert not thread.is_alive()


def test_what_no_server_could_answer_is_refused() -> None:
    engine = served(policy_of())
    with engine.session(OPTIONS, max_tokens=10) as session, pytest.raises(UserError, match="but a call may have 10"):
        session.submit(CallRequest(id=0, lane=0, token_ids=(1,) * 9, stream=1, first_position=0, max_new_tokens=2))
    fresh = VLLMEngine(engine.servers, policy_of(), tiny_tokenizer(), eos_token_ids=[2])
    with pytest.raises(UserError, match="has no weights yet"), fresh.session(OPTIONS, max_tokens=10):
        pass
