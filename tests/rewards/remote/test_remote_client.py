"""What becomes of a step whose reward service is slow, broken, full or gone: it ends in time, and counts are right."""

import gc
import json
import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from typing import Any

import pytest
from reward_services import (
    OPENED,
    ScriptedService,
    drip,
    dripping,
    dripping_headers,
    good,
    grades,
    hang_up,
    reply,
    silent,
)

from proximo import http_client
from proximo.errors import ConfigError, DataError, TrainingError
from proximo.records import Response, Scored, ScoreState
from proximo.rewards import remote
from proximo.rewards.protocol import read_reply, read_request, reply_body, request_body
from proximo.rewards.remote import RemoteLimits, RemoteReward
from proximo_verifiers import progress_log
from records_made import prompt, response
from waiting import LATEST_SECONDS, wait_until

FAULT = ScoreState.INFRASTRUCTURE_FAULT
QUICK: dict[str, Any] = {"initial_backoff_seconds": 0.01, "attempts": 2, "request_seconds": 200, "step_seconds": 300}
SHORT_SECONDS = 0.2
"""For requests that are never answered."""
TOKEN = "s3cret-token"


def source(url: str, *, token: str | None = None, **limits: Any) -> RemoteReward:
    made = RemoteReward(url, limits=RemoteLimits(**{**QUICK, **limits}), token=token, token_env=token and "TOKEN")
    OPENED.append(made)
    return made


def impatient_when(reward: RemoteReward, is_so: Callable[[], bool]) -> None:
    """Requests have little time only when it is so. What is answered is thus never late."""
    send = reward._client.send
    reward._client.send = lambda *given, seconds, **more: send(  # ty: ignore
        *given, seconds=SHORT_SECONDS if is_so() else seconds, **more
    )


def asked(count: int) -> list[Response]:
    return [response(text=f"answer {index}") for index in range(count)]


def states(scored: Sequence[Scored]) -> list[ScoreState]:
    assert all(math.isnan(each.score) == (each.state is FAULT) for each in scored)
    return [each.state for each in scored]


def test_batches_are_cut_to_size_and_grades_come_back_in_order() -> None:
    def by_number(connection, count):
        numbers = [float(text.split()[1]) for text in texts(service.requests[-1])]
        reply(grades(numbers))(connection, count)

    with ScriptedService(by_number) as service:
        scored = source(service.url, responses_per_request=3, max_concurrent_requests=1).score(asked(8))
        assert [each.score for each in scored] == list(range(8))
        assert [len(texts(request)) for request in service.requests] == [3, 3, 2]
        assert [each.response.text for each in scored] == [f"answer {n}" for n in range(8)]


def texts(request: bytes) -> list[str]:
    return [each["text"] for each in json.loads(request.partition(b"\r\n\r\n")[2])["responses"]]


def test_nothing_is_asked_about_nothing() -> None:
    with ScriptedService(hang_up) as service:
        assert source(service.url).score([]) == []
        assert service.requests == []


NAN = grades([float("nan")])
BAD_REPLIES = {
    "garbage": (b"<html>oops</html>", "Invalid JSON"),
    "nothing": (b"", "Invalid JSON"),
    "wrong count": (grades([1.0, 1.0]), "expected results for 1 response "),
    "no grade": (grades([]), "expected results for 1 response "),
    "other ids": (grades([1.0]).replace(b'"id": 0', b'"id": 1'), "expected results for 1 response "),
    "NaN": (NAN, "finite number"),
    "infinity": (NAN.replace(b"NaN", b"1e999"), "finite number"),
    "text for a number": (NAN.replace(b"NaN", b'"1"'), "valid number"),
    "true for a number": (NAN.replace(b"NaN", b"true"), "valid number"),
    "no score": (grades([None]), "is scored with score None"),
    "score of a fault": (grades([1.0], state="infrastructure_fault"), "infrastructure_fault with score 1.0"),
    "score of what does not apply": (grades([1.0], state="not_applicable"), "not_applicable with score 1.0"),
    "no such state": (grades([1.0], state="fine"), "state"),
    "component of no name": (grades([1.0], components={"a b": 1}), "should match pattern"),
    "component of no number": (NAN.replace(b"NaN", b'1, "components": {"a": NaN}'), "finite number"),
    "too few token rewards": (grades([1.0], token_rewards=[1.0]), "each of 3 tokens"),
    "unknown key": (grades([1.0], grade=1), "grade"),
    "a number as its format": (b'{"format": 5, "results": []}', "format: "),
}


@pytest.mark.parametrize("name", BAD_REPLIES)
def test_nonsense_is_asked_for_again_and_then_has_no_score(name: str) -> None:
    body, reason = BAD_REPLIES[name]
    with ScriptedService(reply(body), good) as service:
        assert states(source(service.url).score(asked(1))) == [ScoreState.SCORED]
        assert len(service.requests) == 2
    with ScriptedService(reply(body)) as service:
        (scored,) = source(service.url).score(asked(1))
        assert scored.state is FAULT
        assert scored.reason is not None
        assert reason in scored.reason
        assert "at attempt 2" in scored.reason


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (reply(b"", "500 Internal Server Error"), "status 500"),
        (reply(b"", "503 Service Unavailable"), "status 503"),
        (reply(b"", "429 Too Many Requests"), "status 429"),
        (reply(b"", "408 Request Timeout"), "status 408"),
        (hang_up, "RemoteProtocolError"),
        (reply(grades([1.0])[:20], claimed=500), "RemoteProtocolError"),
        (reply(b"x", "200 OK", "Content-Encoding: gzip"), "compressed"),
        (silent, "no complete reply within 0.2 s"),
        (dripping, "no complete reply within 0.2 s"),
        (dripping_headers, "no complete reply within 0.2 s"),
    ],
)
def test_what_may_pass_is_tried_again_and_then_has_no_score(behaviour: Any, reason: str) -> None:
    is_late = "no complete reply" in reason
    with ScriptedService(behaviour, good) as service:
        made = source(service.url, attempts=12)
        impatient_when(made, lambda: is_late and not service.requests)
        assert states(made.score(asked(1))) == [ScoreState.SCORED]
    with ScriptedService(behaviour) as service:
        made = source(service.url)
        impatient_when(made, lambda: is_late)
        (scored,) = made.score(asked(1))
        assert scored.state is FAULT
        assert scored.reason is not None
        assert reason in scored.reason
        assert scored.reason.endswith("at attempt 2")


def test_a_body_without_an_end_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "MAX_REPLY_BYTES", 10_000)
    with ScriptedService(reply(b" " * 20_000)) as service:
        (scored,) = source(service.url).score(asked(1))
        assert scored.state is FAULT
        assert "more than 10000 bytes" in str(scored.reason)


def test_a_thread_of_requests_that_does_nothing_any_more_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "CLOSING_SECONDS", 0.1)
    with ScriptedService(silent) as service:
        made = http_client.HttpClient(service.url, kept_connections=1, advice=str)
        go_on = threading.Event()
        made._loop.call_soon_threadsafe(go_on.wait)
        found: list[str] = []

        def ask() -> None:
            try:
                made.send("POST", "/", b"{}", seconds=0.2)
            except http_client.UnansweredError as error:
                found.append(str(error))

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(LATEST_SECONDS)
        told = list(found)
        go_on.set()
        asking.join()
        made.close()
        assert told == ["no complete reply within 0.2 s"]


def test_a_request_ends_with_its_client(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that waits for it does not wait until its deadline, and nothing is left in the loop."""
    monkeypatch.setattr(http_client, "CLOSING_SECONDS", LATEST_SECONDS)
    said: list[str] = []
    with ScriptedService(silent) as service:
        client = http_client.HttpClient(service.url, kept_connections=1, advice=str)

        def ask() -> None:
            with pytest.raises(http_client.UnansweredError) as caught:
                client.send("POST", "/", request_body([]), seconds=2 * LATEST_SECONDS)
            said.append(str(caught.value))

        threads = [threading.Thread(target=ask, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(service.requests) == 3)
        client.close()
        assert not client._thread.is_alive(), "it did not end within CLOSING_SECONDS"
        for thread in threads:
            thread.join(LATEST_SECONDS)
        ask()
        client.close()
    assert said == ["the client was closed"] * 4
    gc.collect()  # a task or coroutine that was left in the loop complains when it goes
    assert not caplog.records


LONG = 1000.0


def endless(status: str) -> Any:
    """Says why it gives this status, and never ends."""
    return lambda connection, _: drip(connection, f"HTTP/1.1 {status}\r\nContent-Length: 9999\r\n\r\nno".encode())


@pytest.mark.parametrize(
    ("behaviour", "said", "seconds", "detail_seconds"),
    [
        (reply(b'{"error": "no\nmemory"}', "500 No"), 'status 500 ({"error": "no memory"})', LONG, LONG),
        (reply(b"later", "429 Too Many Requests"), "status 429 (later)", LONG, LONG),
        (reply(b"cut", "503 Full", claimed=99), "status 503", LONG, LONG),
        (endless("503 Full"), "status 503", LONG, 0.5),
        (endless("400 Bad Request"), "refuses with status 400: advice", LONG, 0.5),
        # The status itself has these seconds too.
        (endless("503 Full"), "status 503", 2.0, LONG),
    ],
    ids=["500", "429", "cut", "endless", "endless refusal", "endless beyond the deadline"],
)
def test_what_a_service_says_of_its_error_is_shown_if_it_comes_soon(
    *, behaviour: Any, said: str, seconds: float, detail_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status is the outcome; what says more of it is waited for neither long nor beyond the deadline."""
    monkeypatch.setattr(http_client, "DETAIL_SECONDS", detail_seconds)
    with ScriptedService(behaviour) as service:
        client = http_client.HttpClient(service.url, kept_connections=1, advice=lambda _: "advice")
        start = time.monotonic()
        with pytest.raises((http_client.UnansweredError, http_client.RequestRefusedError)) as caught:
            client.send("POST", "/", request_body([]), seconds=seconds)
        assert time.monotonic() - start < LONG / 2
        client.close()
    assert str(caught.value).endswith(said)


def test_nobody_listens() -> None:
    with ScriptedService(good) as service:
        url = service.url
    (scored,) = source(url).score(asked(1))
    assert scored.state is FAULT
    assert "ConnectError" in str(scored.reason)


@pytest.mark.parametrize("behaviour", [silent, dripping, hang_up, reply(b"", "503 Full", "Retry-After: 99")])
def test_a_step_ends_at_its_deadline_and_every_response_is_accounted_for(behaviour: Any) -> None:
    with ScriptedService(good, behaviour) as service:
        reward = source(
            service.url,
            responses_per_request=2,
            max_concurrent_requests=3,
            request_seconds=500,
            step_seconds=500,
            attempts=1000,
            initial_backoff_seconds=0.05,
        )
        collect = reward._collect

        def until_soon(answers: Any, call: remote._Call) -> Any:
            """The deadline comes soon after the first result, however long that took."""
            wait(answers, LATEST_SECONDS, FIRST_COMPLETED)
            call.deadline = time.monotonic() + 0.5
            return collect(answers, call)

        reward._collect = until_soon  # type: ignore[method-assign]
        start = time.monotonic()
        found = states(reward.score(asked(9)))
        assert time.monotonic() - start < LATEST_SECONDS  # and not the 500 s of a request
        assert found.count(ScoreState.SCORED) in (1, 2)  # the first request that came, of two responses or of one
        assert found.count(FAULT) == 9 - found.count(ScoreState.SCORED)


def test_a_service_that_says_when_to_come_back_is_left_alone_until_then() -> None:
    with ScriptedService(reply(b"", "429 Slow down", "Retry-After: 1"), good) as service:
        start = time.monotonic()
        assert states(source(service.url).score(asked(1))) == [ScoreState.SCORED]
        assert time.monotonic() - start >= 1


def test_pauses_double_and_are_the_same_in_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def pauses() -> list[float]:
        found: list[float] = []
        with ScriptedService(reply(b"", "500 No")) as service:
            reward = source(service.url, attempts=5, initial_backoff_seconds=0.02)
            call = remote._Call(time.monotonic() + 60)
            monkeypatch.setattr(call.over, "wait", found.append)
            with pytest.raises(http_client.UnansweredError):
                reward._answer(remote._score_request(3, asked(1)), call)
        return found

    first = pauses()
    assert len(first) == 4
    assert all(0.5 <= pause / (0.02 * 2**n) <= 1 for n, pause in enumerate(first))
    assert pauses() == first


@pytest.mark.parametrize(
    ("behaviour", "pieces"),
    [
        (reply(b'{"detail": "who?"}', "401 Unauthorized"), ("status 401", "who?", "variable TOKEN is not")),
        (reply(b"", "403 Forbidden"), ("status 403", "TOKEN")),
        (reply(b"", "404 Not Found"), ("status 404", "serve-reward")),
        (reply(b"", "413 Too Large"), ("status 413", "lower responses_per_request")),
        (reply(b"", "400 Bad Request"), ("status 400",)),
        (reply(b"", "302 Found", "Location: http://127.0.0.1:9/"), ("status 302", "not followed")),
        (reply(b'{"format": "proximo.reward/2", "x": 1}'), ("'proximo.reward/2'", "use the same version")),
        (reply(grades([1.0]).replace(b"reward/1", b"reward/9")), ("'proximo.reward/9'", "use the same version")),
    ],
)
def test_a_service_that_calls_the_request_wrong_stops_the_run_at_once(behaviour: Any, pieces: Sequence[str]) -> None:
    for method, error in (("score", TrainingError), ("check", ConfigError)):
        with ScriptedService(behaviour) as service:
            reward = source(service.url, token=TOKEN, attempts=9)
            with pytest.raises(error) as caught:
                reward.score(asked(1)) if method == "score" else reward.check()
            assert len(service.requests) == 1
        assert all(piece in str(caught.value) for piece in pieces)
        assert TOKEN not in str(caught.value)


def test_without_a_token_the_advice_is_to_name_one() -> None:
    with ScriptedService(reply(b"", "401 Unauthorized")) as service, pytest.raises(ConfigError, match="token_env"):
        source(service.url).check()


def test_a_service_that_is_not_there_is_a_mistake_at_the_start() -> None:
    with ScriptedService(good) as service:
        source(service.url).check()
        url = service.url
    with pytest.raises(ConfigError, match="no reward service answers"):
        source(url).check()


def test_a_service_that_is_slow_at_the_start_is_named_while_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def named(connection: Any, count: int) -> None:
        said = re.compile(rf"reward source remote: waiting for a reply of {re.escape(service.url)} since \d+ s")
        wait_until(lambda: any(said.fullmatch(record.getMessage()) for record in caplog.records))
        good(connection, count)

    monkeypatch.setattr(progress_log, "LOG_EVERY_SECONDS", 0.05)
    monkeypatch.setattr(remote, "CHECK_SECONDS", LATEST_SECONDS)
    with ScriptedService(named) as service:
        source(service.url).check()


def test_half_of_a_surrogate_pair_costs_no_request() -> None:
    (told,) = read_request(request_body([response(text="fo\ud800ur")]))
    assert told.text == "fo?ur"
    fault = Scored(response=told, score=0.0, state=ScoreState.MODEL_FAULT, reason="ValueError: \ud800")
    (found,) = read_reply(reply_body([fault]), [told])
    assert found.reason == "ValueError: ?"


def test_the_token_goes_into_the_header_isolated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    with ScriptedService(good) as service:  # on this machine, so no proxy stands between
        assert states(source(service.url, token=TOKEN).score(asked(1))) == [ScoreState.SCORED]
        head, _, body = service.requests[0].partition(b"\r\n\r\n")
    assert f"Bearer {TOKEN}".encode() in head
    assert TOKEN.encode() not in body


def test_metadata_that_json_cannot_say_is_an_error_of_the_data() -> None:
    bad = response(to=prompt("row 7", metadata={"picture": object()}))
    with ScriptedService(good) as service, pytest.raises(DataError, match="row 7"):
        source(service.url).score([bad])


def test_token_rewards_and_faults_of_the_model_come_through() -> None:
    body = grades([-1.0], state="model_fault", reason="r" * 2000, components={"a.b": 2}, token_rewards=[0, 0, -1.0])
    with ScriptedService(reply(body)) as service:
        (found,) = source(service.url).score(asked(1))
    assert (found.score, found.state, dict(found.components)) == (-1.0, ScoreState.MODEL_FAULT, {"a.b": 2.0})
    assert found.token_rewards == (0.0, 0.0, -1.0)
    assert found.reason == "r" * 500


def test_what_was_done_is_counted_by_response_and_then_forgotten() -> None:
    broken, half = reply(b"", "500 No"), reply(grades([0.0, 1.0], state="model_fault"))
    with ScriptedService(broken, half, silent) as service:
        reward = source(service.url, responses_per_request=2, max_concurrent_requests=1)
        impatient_when(reward, lambda: len(service.requests) >= 2)
        states(reward.score(asked(5)))
        found = reward.statistics()
    value = {name.removeprefix("source/remote/"): metric.value for name, metric in found.items()}
    assert value["failure_fraction"] == value["timeout_fraction"] == 3 / 5
    assert value["model_fault_fraction"] == 2 / 5
    assert value["retries"] == 3
    assert value["cache_hit_fraction"] == value["worker_restarts"] == 0
    assert LATEST_SECONDS > value["seconds_p99"] >= value["seconds_p50"] >= 2 * SHORT_SECONDS
    assert reward.statistics() == {}


@pytest.mark.parametrize("token", [f"{TOKEN} ", f"{TOKEN}\n", f"{TOKEN}\x00"])
def test_a_token_that_no_header_can_hold_is_refused_without_being_shown(token: str) -> None:
    with ScriptedService(good) as service, pytest.raises(ConfigError, match="HTTP does not allow this token") as caught:
        source(service.url, token=token).check()
    assert TOKEN not in str(caught.value)
