"""The policy as a server: what it answers, what it records, what it refuses."""

import json
import socket
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from model_servers import EOS, Asking, WrittenSession, chat, ids, post, recording, request_of, serving
from proximo.environments import recorder
from proximo.environments import server as server_module
from proximo.environments.agents import model_server
from proximo.environments.environment import EnvironmentStep
from proximo.environments.recorder import Recording
from proximo.environments.server import ModelServer
from proximo.environments.turn_renderer import TurnRenderer
from proximo.errors import ConfigError
from proximo.records import Finish, Response
from proximo.rollout.vllm.requests import read_choice
from tool_templates import TOOL_FAMILIES
from waiting import LATEST_SECONDS, wait_until


def test_ids_go_in_and_ids_come_out_in_the_form_that_a_client_of_vllm_reads() -> None:
    with serving("ab") as (server, session):
        noted = recording(session)
        server.begin(noted)
        url = server.base_url("secret").removesuffix("/v1") + "/inference/v1/generate"
        body = {"token_ids": list(ids("hi")), "sampling_params": {"max_tokens": 5, "stop_token_ids": [EOS]}}
        choice = read_choice(post(url, body).content, limit=5, vocab_size=300)
        assert choice.token_ids == (*ids("ab"), EOS)
        assert choice.logprobs == (-0.5,) * 3
        assert choice.weight_versions == (("7", 0), ("8", 1))
        (request,) = session.asked
        assert (request.token_ids, request.stream, request.max_new_tokens) == (ids("hi"), 5, 5)
        response = finished(noted, reward=2.0)
        assert response.prompt.token_ids == ids("hi")
        assert response.prompt.text == "hi"
        assert response.token_versions == (7, 8, 8)
        assert response.episode is not None
        assert response.episode.reward == 2.0
        assert response.text == "ab"


def test_tools_whose_calls_would_not_be_read_are_refused() -> None:
    renderer = TurnRenderer(TOOL_FAMILIES["deepseek 3"].tokenizer())
    with closing(model_server(renderer, max_tokens=900, host="127.0.0.1", token=None)) as server:
        server.begin(recording(session := WrittenSession(server=server, reply="ab")))
        tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
        answer = chat(server.base_url("secret"), "hi", tools=tools)
        assert answer.status_code == 400
        assert "writes calls of tools in a style that is not known" in answer.text
        assert session.asked == []


def finished(noted: Recording, reward: float = 0.0) -> Response:
    noted.answer(EnvironmentStep(observation="", reward=reward, terminated=True))
    assert noted.trajectory is not None
    return noted.trajectory.response(Finish.TERMINATED)


def test_messages_that_go_on_are_put_behind_the_ids_of_the_policy() -> None:
    with serving() as (server, session):
        noted = recording(session)
        server.begin(noted)
        url = server.base_url("secret")
        session.reply = " ab "
        said = chat(url, "hi").json()["choices"][0]
        assert (said["message"]["content"], said["finish_reason"]) == (" ab ", "stop")
        session.reply = "c"
        usage = chat(url, "hi", "ab", "more").json()["usage"]  # this client strips
        first, second = session.asked
        assert second.token_ids == (*first.token_ids, *ids(" ab "), EOS, *ids("|user:more|assistant:"))
        assert usage["prompt_tokens"] == len(second.token_ids)
        assert second.first_position == 5
        response = finished(noted)
        assert response.forks == ()
        assert [turn.observation for turn in response.episode.turns] == ["user: more", ""]
        written = [id for id, own in zip(response.token_ids, response.response_mask, strict=True) if own]
        assert written == [*ids(" ab "), EOS, *ids("c"), EOS]


@pytest.mark.parametrize(
    ("second", "tools"),
    [(("hi", "other", "more"), None), (("more",), None), (("hi", "ab", "more"), [{"name": "t", "parameters": {}}])],
)
def test_other_messages_or_tools_fork(second: tuple[str, ...], tools: Any) -> None:
    with serving("ab") as (server, session):
        noted = recording(session)
        server.begin(noted)
        chat(server.base_url("secret"), "hi")
        chat(server.base_url("secret"), *second, tools=tools)
        response = finished(noted)
        assert [(fork.start, fork.context) for fork in response.forks] == [(3, session.asked[1].token_ids)]
        assert len(response.token_ids) == 6


def test_a_history_that_a_client_shortened_keeps_the_ids_of_the_policy() -> None:
    with serving("ab", max_turns=9) as (server, session):
        noted = recording(session, max_turns=9)
        server.begin(noted)
        url = server.base_url("secret")
        chat(url, "one")
        session.reply = "cd"
        chat(url, "one", "ab", "two")
        chat(url, "shorter", "cd", "three")
        assert session.asked[2].token_ids == (*ids("user:shorter|assistant:cd"), EOS, *ids("|user:three|assistant:"))
        assert [fork.context for fork in finished(noted).forks] == [session.asked[2].token_ids]


def test_an_answer_ends_before_its_stop_string_and_its_tokens_with_it() -> None:
    with serving() as (server, session):
        noted = recording(session)
        server.begin(noted)
        asking = Asking(server.base_url("secret"), "hi", stop="END")
        wait_until(lambda: session.asked)
        session.write("abEND", finish=Finish.STOP)
        assert asking.result().json()["choices"][0]["message"]["content"] == "ab"
        assert finished(noted).token_ids == ids("abEND")


def test_a_call_that_the_engine_gave_up_makes_a_fault() -> None:
    with serving() as (server, session):
        noted = recording(session)
        server.begin(noted)
        asking = Asking(server.base_url("secret"), "hi")
        wait_until(lambda: session.asked)
        session.write("ab", finish=Finish.ABORTED)
        assert asking.result().status_code == 503
        assert noted.fault == "the engine gave up a call of the policy"


def test_two_conversations_of_one_trajectory_keep_their_ids() -> None:
    with serving("ab", max_turns=9) as (server, session):
        noted = recording(session)
        server.begin(noted)
        url = server.base_url("secret")
        chat(url, "one")
        chat(url, "two")
        chat(url, "one", "ab", "more")
        first, _, third = session.asked
        assert third.token_ids[: len(first.token_ids) + 3] == (*first.token_ids, *ids("ab"), EOS)


def test_calls_of_tools_come_as_calls_and_are_counted() -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    with serving('<tool_call>{"name": "add", "arguments": {"a": "1"}}</tool_call>') as (server, session):
        noted = recording(session)
        server.begin(noted)
        url = server.base_url("secret")
        choice = chat(url, "hi", tools=tools).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        (call,) = choice["message"]["tool_calls"]
        assert (call["type"], call["function"]) == ("function", {"name": "add", "arguments": '{"a": "1"}'})
        session.reply = "<tool_call>add"
        messages = [
            {"role": "user", "content": "hi"},
            choice["message"],
            {"role": "tool", "tool_call_id": call["id"], "content": "2"},
        ]
        again = post(f"{url}/chat/completions", {"messages": messages, "tools": tools}).json()["choices"][0]
        assert (again["message"]["content"], again["finish_reason"]) == ("<tool_call>add", "stop")
        assert session.asked[1].token_ids[: len(session.asked[0].token_ids)] == session.asked[0].token_ids
        turns = finished(noted).episode.turns
        assert [(turn.num_tool_calls, turn.num_malformed_calls) for turn in turns] == [(1, 0), (0, 1)]


def test_a_stream_is_the_answer_in_one_piece() -> None:
    with serving("ab") as (server, session):
        server.begin(recording(session))
        reply = chat(server.base_url("secret"), "hi", stream=True, stream_options={"include_usage": True})
        events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
        assert events.pop() == "[DONE]"
        said, ended, usage = map(json.loads, events)
        assert said["choices"][0]["delta"]["content"] == "ab"
        assert ended["choices"][0]["finish_reason"] == "stop"
        assert usage["usage"]["completion_tokens"] == 3


def test_options_of_sampling_have_no_effect_and_are_counted_by_name() -> None:
    with serving("ab") as (server, session):
        server.begin(recording(session))
        url = server.base_url("secret")
        assert chat(url, "hi", temperature=1.0, seed=3, top_p=1, max_tokens=2).is_success
        assert chat(url, "hi", temperature=0, presence_penalty=0.0).is_success
        assert server.ignored == {"seed": 1, "temperature": 1}
        assert session.asked[0].max_new_tokens == 2


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"n": 2}, "n must be 1"),
        ({"stop": ["STOP"]}, "stop 'STOP' ends no response of this run: name it in ppo.rollout.stop_strings"),
        ({"stop_token_ids": [9]}, "stop_token_ids 9"),
        ({"max_tokens": 0}, "max_tokens must be"),
        ({"response_format": {"type": "json_object"}}, "response_format 'json_object'"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"messages": "hi"}, "messages must be a list"),
        ({"messages": []}, "must be a list of messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "models here read text only"),
        ({"tools": [{"a": 1}]}, "must be a function with a name"),
    ],
)
def test_what_the_policy_cannot_do_is_refused_with_the_reason(body: dict[str, Any], said: str) -> None:
    with serving("ab") as (server, session):
        noted = recording(session)
        server.begin(noted)
        reply = chat(server.base_url("secret"), "hi", **body)
        assert reply.status_code == 400
        assert said in reply.json()["error"]["message"]
        assert reply.headers["x-should-retry"] == "false"
        assert noted.trajectory is None


@pytest.mark.parametrize("token_ids", [None, [], [300], [-1], [1.5], [True]])
def test_ids_outside_the_vocabulary_are_refused(token_ids: Any) -> None:
    with serving("ab") as (server, session):
        server.begin(recording(session))
        url = server.base_url("secret").removesuffix("/v1") + "/inference/v1/generate"
        assert post(url, {"token_ids": token_ids}).status_code == 400
        assert session.asked == []


@pytest.mark.parametrize("body", [b"{", b"[]", b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with serving("ab") as (server, session):
        server.begin(recording(session))
        url = server.base_url("secret") + "/chat/completions"
        assert httpx2.post(url, content=body, trust_env=False, verify=False).status_code == 400


def test_limits_of_the_run_refuse_further_calls() -> None:
    with serving("ab") as (server, session):
        noted, long = recording(session, max_turns=1), recording(session, "long", max_tokens=20)
        server.begin(noted, long)
        assert chat(server.base_url("secret"), "hi").is_success
        reply = chat(server.base_url("secret"), "hi", "ab", "more")
        assert (reply.status_code, reply.json()["error"]["code"], noted.limit) == (400, "max_turns", "max_turns")
        reply = chat(server.base_url("long"), "long text")
        assert (reply.json()["error"]["code"], long.limit) == ("context_length_exceeded",) * 2
        assert server.refused == {"max_turns": 1, "context_length_exceeded": 1}


def test_the_last_call_writes_what_there_is_room_for() -> None:
    with serving("ab") as (server, session):
        server.begin(recording(session, max_tokens=len("user:hi|assistant:") + 3))
        chat(server.base_url("secret"), "hi", max_tokens=7)
        chat(server.base_url("secret"), "hi", max_completion_tokens=None, max_tokens=2)
        assert [each.max_new_tokens for each in session.asked] == [3, 2]


def test_calls_need_a_trajectory_that_has_not_ended() -> None:
    with serving("ab") as (server, session):
        noted = recording(session)
        server.begin(noted)
        server.end("secret")
        for url in (server.base_url("secret"), f"{server.url}/v1"):
            assert chat(url, "hi").status_code == 404
        assert session.asked == []
        assert noted.trajectory is None
        models = httpx2.get(f"{server.url}/v1/models", trust_env=False, verify=False).json()
        assert models["data"][0]["max_model_len"] == 64


def test_a_trajectory_may_be_named_in_a_header() -> None:
    with serving("ab") as (server, session):
        server.begin(recording(session))
        body = {"messages": [{"role": "user", "content": "hi"}]}
        assert post(f"{server.url}/v1/chat/completions", body, headers={"X-Session-ID": "secret"}).is_success


def test_a_token_is_asked_for() -> None:
    with serving("ab", token="t0ken") as (server, session):
        server.begin(recording(session))
        assert chat(server.base_url("secret"), "hi").status_code == 401
        url = server.base_url("secret") + "/models"
        assert httpx2.get(url, headers={"Authorization": "Bearer t0ken"}, trust_env=False, verify=False).is_success


def test_an_address_of_another_machine_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match=r"environment\.host: cannot listen on 192\.0\.2\.1"),
        serving(host="192.0.2.1"),
    ):
        pass


def break_off(server: ModelServer, session: WrittenSession) -> None:
    """Ask, and close the connection before the answer."""
    head, body, address = request_of(server)
    with socket.create_connection(address) as client:
        client.sendall(head + body)
        wait_until(lambda: session.asked)
    wait_until(lambda: server.recorder.num_broken_off)


def test_a_client_that_breaks_off_leaves_no_trace_and_may_ask_again() -> None:
    with serving() as (server, session):
        noted = recording(session)
        server.begin(noted)
        break_off(server, session)
        retry = Asking(server.base_url("secret"), "hi")
        session.reply = "ab"  # for what is asked from now on: the retry, which waits for the end of the first call
        session.write("lost", session.asked[0])
        assert retry.result().json()["choices"][0]["message"]["content"] == "ab"
        first, second = session.asked
        assert (first.token_ids, first.first_position) == (second.token_ids, second.first_position)
        assert finished(noted).token_ids == (*ids("ab"), EOS)
        assert server.recorder.num_broken_off == 1


def test_two_clients_at_once_make_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "HANDOVER_SECONDS", 0.01)
    with serving() as (server, session):
        noted = recording(session)
        server.begin(noted)
        first = Asking(server.base_url("secret"), "hi")
        wait_until(lambda: session.asked)
        refused = chat(server.base_url("secret"), "ho")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "two_clients")
        session.write("ab")
        assert first.result().is_success
        assert chat(server.base_url("secret"), "hi", "ab", "more").json()["error"]["code"] == "fault"
        assert noted.fault is not None
        assert len(session.asked) == 1
        assert server.refused == {"two_clients": 1, "fault": 1}


def test_a_call_that_waits_ends_with_its_trajectory() -> None:
    with serving() as (server, session):
        noted = recording(session)
        server.begin(noted)
        waiting = Asking(server.base_url("secret"), "hi")
        wait_until(lambda: session.asked)
        server.end("secret")
        assert waiting.result().json()["error"]["code"] == "unknown_trajectory"
        session.write("late")
        server.in_loop(lambda: None)
        assert noted.trajectory is None


def test_a_request_that_arrives_whole_after_the_end_is_refused() -> None:
    with serving("ab") as (server, session):
        server.begin(recording(session))
        head, body, address = request_of(server, "Expect: 100-continue\r\n")
        with socket.create_connection(address, timeout=LATEST_SECONDS) as client:
            client.sendall(head)
            assert client.recv(100).startswith(b"HTTP/1.1 100")  # the trajectory is found, and the body awaited
            server.end("secret")
            client.sendall(body)
            assert client.recv(100).startswith(b"HTTP/1.1 404")
        assert session.asked == []


def test_an_answer_that_comes_together_with_the_end_is_not_noted() -> None:
    with serving() as (server, session):
        noted = recording(session)
        server.begin(noted)
        waiting = Asking(server.base_url("secret"), "hi")
        wait_until(lambda: session.asked)
        session.server = SimpleNamespace(answered=lambda calls: server.recorder.answered(*calls))
        server.in_loop(lambda: [session.write("ab"), server.recorder.end("secret")])
        assert waiting.result().json()["error"]["code"] == "unknown_trajectory"
        assert noted.trajectory is None


def test_a_server_that_closes_leaves_nobody_waiting() -> None:
    with serving() as (server, session):
        server.begin(recording(session))
        waiting = Asking(server.base_url("secret"), "hi")
        wait_until(lambda: session.asked)
    response = waiting.ended()
    assert response is None or not response.is_success


def test_a_flood_of_requests_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_WAITING", 2)
    with serving() as (server, session):
        names = [f"t{number}" for number in range(5)]
        server.begin(*(recording(session, name) for name in names))
        asked = [Asking(server.base_url(name), "hi") for name in names]
        wait_until(lambda: server.refused["503"] == 3)
        session.reply = "ab"
        for request in list(session.asked):
            session.write("ab", request)
        assert sorted(each.result().status_code for each in asked) == [200, 200, 503, 503, 503]
        assert chat(server.base_url("t0"), "hi", "ab", "more").is_success


def test_a_body_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_BODY_BYTES", 1000)
    with serving("ab") as (server, session):
        server.begin(recording(session))
        assert chat(server.base_url("secret"), "hi" * 1000).status_code == 413
        assert session.asked == []


def test_what_was_not_answered_is_counted_since_the_last_look() -> None:
    with serving("ab") as (server, session):
        server.begin(recording(session))
        chat(server.base_url("secret"), "hi", seed=1)
        chat(server.base_url("none"), "hi")
        assert server.counts() == {"refused_calls": 1, "ignored_options": 1, "broken_off_calls": 0}
        assert set(server.counts().values()) == {0}
        chat(server.base_url("none"), "hi")
        assert server.counts()["refused_calls"] == 1
        assert set(server.counts().values()) == {0}
