"""`proximo serve-reward` as it runs, in a process of its own: asked, overloaded, slowed, killed, and asked to end."""

import json
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from reward_services import OPENED, Service, make_folder, real_service

from proximo.config.rewards.verifiers import PatternRewardConfig
from proximo.errors import ConfigError, TrainingError
from proximo.http_client import UnansweredError
from proximo.records import Finish, Response, Scored, ScoreState
from proximo.rewards.function import FunctionReward
from proximo.rewards.protocol import SCHEMA, SCORE_PATH, request_body
from proximo.rewards.remote import RemoteLimits, RemoteReward
from proximo.rewards.weighted import WeightedReward
from proximo.run.make.reward_sources import build_source_without_model
from records_made import prompt, response
from waiting import LATEST_SECONDS, wait_until

TOKEN = "s3cret"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("service"))


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Service]:
    options = ("--token-env", "REWARD_TOKEN", "--concurrency", "2", "--queue-size", "1", "--request-mib", "1")
    with real_service(folder, *options, "reward.0.weight=0.5", REWARD_TOKEN=TOKEN) as found:
        yield found


def source(url: str, token: str | None = TOKEN, **limits: Any) -> RemoteReward:
    limits = {"initial_backoff_seconds": 0.05, **limits}
    made = RemoteReward(url, limits=RemoteLimits(**limits), token=token, token_env=token and "REWARD_TOKEN")
    OPENED.append(made)
    return made


def some_responses() -> list[Response]:
    messages = ({"role": "user", "content": "2+2?"},)
    return [
        response(text="over and over", to=prompt("a", answer="four", metadata={"level": [1, {"x": None}]})),
        response((7,), text="5", to=prompt("b", text=None, messages=messages, answer="4"), finish=Finish.LENGTH),
        response(text="parts"),
        response(text="unknown"),
        response((), text=""),
        response(text="naïve ☃ \x00 text"),
    ]


def facts(scored: Any) -> list[Any]:
    return [(each.state, repr(each.score), dict(each.components), each.token_rewards) for each in scored]


def test_grades_are_those_of_the_same_sources_here(service: Service, folder: Path) -> None:
    namespace: dict[str, Any] = {}
    exec((folder / "service_reward.py").read_text(), namespace)
    verifier = PatternRewardConfig(kind="pattern", name="graded", pattern="[a-m]$", workers=1)
    sources = [(0.5, FunctionReward(namespace["score"], name="mine")), (1.0, build_source_without_model(verifier))]
    with closing(WeightedReward(sources)) as local:
        asked = some_responses()
        here = local.score(asked)
    there = source(service.url, responses_per_request=2).score(asked)
    unknown = 3
    assert there[unknown].state is here[unknown].state is ScoreState.INFRASTRUCTURE_FAULT
    assert there[unknown].reason == here[unknown].reason
    del here[unknown], there[unknown]
    assert facts(there) == facts(here)
    assert there[2].token_rewards == (0.25, 0.25, 0.25)


@pytest.mark.parametrize("token", [None, "wrong", f"{TOKEN}x", TOKEN.upper()])
def test_who_does_not_know_the_token_gets_nothing(service: Service, token: str | None) -> None:
    with pytest.raises(ConfigError, match="status 401"):
        source(service.url, token=token).check()
    with pytest.raises(TrainingError, match="status 401"):
        source(service.url, token=token).score(some_responses())


def test_health_is_for_everyone(service: Service) -> None:
    assert httpx2.get(f"{service.url}/health", trust_env=False).json() == {"status": "ok", "format": SCHEMA}


@pytest.mark.parametrize(
    ("body", "status", "piece"),
    [
        (b"", 400, "Invalid JSON"),
        (b"[" * 100_000, 400, "recursion limit"),
        (b'{"format": "proximo.reward/9", "responses": []}', 400, "proximo.reward/9"),
        (json.dumps({"format": SCHEMA, "responses": [{"text": "a"}]}).encode(), 400, "responses.0"),
        (b" " * 2_000_000, 413, "1048576 bytes"),
    ],
)
def test_a_bad_request_is_told_what_is_wrong_with_it(service: Service, body: bytes, status: int, piece: str) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    found = httpx2.post(f"{service.url}{SCORE_PATH}", content=body, headers=headers, trust_env=False)
    assert found.status_code == status
    assert piece in found.json()["detail"]


def test_a_request_that_is_too_large_stops_the_run_with_advice(service: Service) -> None:
    large = [response(text="x" * 400_000) for _ in range(3)]
    with pytest.raises(TrainingError, match="lower responses_per_request"):
        source(service.url).score(large)
    assert [each.state for each in source(service.url, responses_per_request=1).score(large)] == [ScoreState.SCORED] * 3


def test_a_full_service_sends_requests_away_and_they_come_back(service: Service, folder: Path) -> None:
    reward = source(service.url, responses_per_request=1, max_concurrent_requests=8, attempts=50)
    send, refused = reward._client.send, list[str]()

    def noting(*given: Any, **more: Any) -> bytes:
        try:
            return send(*given, **more)
        except UnansweredError as error:
            refused.append(str(error))
            raise

    reward._client.send = noting  # ty: ignore
    with asking(reward, [f"wait {n}" for n in range(12)], folder) as scored:
        wait_until(lambda: any("503" in each for each in refused))
        (folder / "go_on").touch()
    assert {each.state for each in scored} == {ScoreState.SCORED}
    assert reward.statistics()["source/remote/retries"].value >= 1  # ty: ignore


def test_a_service_that_is_stopped_and_goes_on_costs_a_retry_and_no_score(service: Service) -> None:
    reward = source(service.url)
    send, limits = reward._client.send, [0.4]

    def goes_on_after_the_first(*given: Any, seconds: float, **more: Any) -> bytes:
        if not limits:
            service.process.send_signal(signal.SIGCONT)
        return send(*given, seconds=limits.pop() if limits else seconds, **more)

    reward._client.send = goes_on_after_the_first  # ty: ignore
    service.process.send_signal(signal.SIGSTOP)
    assert [each.state for each in reward.score([response()])] == [ScoreState.SCORED]
    assert reward.statistics()["source/remote/retries"].value == 1  # ty: ignore


def test_a_request_whose_client_has_given_up_is_not_scored(service: Service, folder: Path) -> None:
    body = request_body([response(text="wait never")])
    headers = {"Authorization": f"Bearer {TOKEN}", "Proximo-Seconds": "0"}
    found = httpx2.post(f"{service.url}{SCORE_PATH}", content=body, headers=headers, trust_env=False)
    assert (found.status_code, found.headers["Retry-After"]) == (503, "1")
    assert not (folder / "wait_never").exists()


def test_a_killed_service_costs_scores_and_one_that_is_asked_to_end_finishes_first(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    with real_service(folder) as killed:
        reward = source(killed.url, None, attempts=3, step_seconds=LATEST_SECONDS)
        with asking(reward, ["wait killed"], folder) as found:
            killed.process.kill()
        assert [each.state for each in found] == [ScoreState.INFRASTRUCTURE_FAULT]
        assert "ConnectError" in found[0].reason
        assert reward.statistics()["source/remote/failure_fraction"].value == 1
    # One that is started in its place, at the same address, is found again.
    with real_service(folder, port=int(killed.url.rpartition(":")[2])) as ended:
        with asking(reward, ["wait ended"], folder) as found:
            ended.process.terminate()
            wait_until(lambda: not accepts(ended.url), "the end of new connections")
            (folder / "go_on").touch()
        assert [each.state for each in found] == [ScoreState.SCORED]
        assert ended.process.wait(LATEST_SECONDS) == 128 + signal.SIGTERM
        assert ended.process.stdout is not None
        assert ended.process.stdout.read() == ""
    with pytest.raises(ConfigError, match="no reward service answers"):
        reward.check()


def accepts(url: str) -> bool:
    """Whether the service takes another connection."""
    try:
        httpx2.get(f"{url}/health", trust_env=False)
    except httpx2.TransportError:
        return False
    return True


@contextmanager
def asking(reward: RemoteReward, texts: Sequence[str], folder: Path) -> Iterator[list[Scored]]:
    """The body is run when the service has begun on one of these responses; the grades are there after it."""
    found: list[Scored] = []
    given = [response(text=text) for text in texts]
    thread = threading.Thread(target=lambda: found.extend(reward.score(given)))
    thread.start()
    begun = [folder / text.replace(" ", "_") for text in texts]
    wait_until(lambda: any(each.exists() for each in begun), "the service's beginning")
    yield found
    thread.join(LATEST_SECONDS)
    assert not thread.is_alive()
