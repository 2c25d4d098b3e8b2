"""What a reward service answers, also to errors and at once: asked in this process, without a network."""

import asyncio
import logging
import re
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from starlette.testclient import TestClient

from proximo.commands import serve_reward
from proximo.commands.serve_options import check_options
from proximo.errors import ConfigError, DataError, TrainingError
from proximo.records import Response, Scored
from proximo.rewards.protocol import CHECK_PATH, SCORE_PATH, check_body, read_checked, read_reply, request_body
from proximo.rewards.service import RewardService, ServiceLimits
from proximo.rewards.weighted import WeightedReward
from records_made import prompt, response


class Source:
    """Does with responses and with prompts what it is told."""

    name = "source"

    def __init__(self, score: Callable[[Sequence[Response]], list[Scored]]) -> None:
        self.score = score

    def check_prompts(self, prompts: Sequence[Any], origins: dict[str, str]) -> None:
        for each in prompts:
            if each.answer is None:
                raise DataError(f"{origins[each.id]}: no answer")
            if each.answer == "crash":
                raise ZeroDivisionError("crashed")


def fine(responses: Sequence[Response]) -> list[Scored]:
    return [Scored(response=each, score=1.0) for each in responses]


@pytest.mark.parametrize("error", [TrainingError("as expected"), ZeroDivisionError("a surprise"), MemoryError("full")])
def test_a_source_that_raises_whatever_it_may_is_a_status_500(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(responses: Sequence[Response]) -> list[Scored]:
        raise error

    service = RewardService(Source(failing))
    with caplog.at_level(logging.ERROR):
        answer = TestClient(service.application()).post(SCORE_PATH, content=request_body([response()]))
    assert answer.status_code == 500
    assert "see the log of the service" in answer.json()["detail"]
    assert str(error) in caplog.text
    assert ("Traceback" in caplog.text) is not isinstance(error, TrainingError)


def test_rewards_of_tokens_may_be_a_list() -> None:
    given: Any = [1.0, 0.0, 0.0]
    source = Source(lambda responses: [replace(each, token_rewards=given) for each in fine(responses)])
    answer = TestClient(RewardService(source).application()).post(SCORE_PATH, content=request_body([response()]))
    assert [each.token_rewards for each in read_reply(answer.content, [response()])] == [(1.0, 0.0, 0.0)]


def test_a_refusal_is_one_line_of_the_log_without_the_token(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    full = RewardService(Source(fine), limits=ServiceLimits(concurrency=1, queue_size=0, request_bytes=9))
    closed = RewardService(Source(fine), token="s3cret-token")
    TestClient(closed.application()).post(SCORE_PATH, headers={"Authorization": "Bearer s3cret-tokem"})
    TestClient(full.application()).post(SCORE_PATH, content=request_body([response()]))
    full._admitted = 1
    TestClient(full.application()).post(SCORE_PATH, content=request_body([response()]))
    assert re.findall(r"(\w+) .*refused a request: status (\d+), '.*'\n", caplog.text) == [
        ("WARNING", "401"),
        ("WARNING", "413"),
        ("DEBUG", "503"),
    ]
    assert "s3cret" not in caplog.text


def test_whether_anybody_is_here_is_answered_while_all_turns_are_taken() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(responses: Sequence[Response]) -> list[Scored]:
        begun.set()
        assert go_on.wait(600)
        return fine(responses)

    service = RewardService(Source(slow), limits=ServiceLimits(concurrency=1))

    async def ask() -> tuple[bytes, bytes]:
        client = httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app=service.application()), base_url="http://test", timeout=600
        )
        async with client:
            asked = asyncio.create_task(client.post(SCORE_PATH, content=request_body([response()])))
            await asyncio.to_thread(begun.wait, 600)
            try:
                probe = await client.post(SCORE_PATH, content=request_body(()))
            finally:
                go_on.set()
            return probe.content, (await asked).content

    probe, scored = asyncio.run(ask())
    assert read_reply(probe, []) == []
    assert [each.score for each in read_reply(scored, [response()])] == [1.0]


def test_rows_are_checked_and_a_check_that_crashes_is_status_500() -> None:
    service = RewardService(WeightedReward([(1.0, serve_reward._OneAtATime(Source(fine)))]))
    client = TestClient(service.application())

    def checked(*answers: str | None) -> Any:
        rows = [prompt(f"p{number}", answer=answer) for number, answer in enumerate(answers)]
        return client.post(CHECK_PATH, content=check_body(rows, {"p1": "x.jsonl, row 2"}))

    assert read_checked(checked("1", "2").content) is None
    assert read_checked(checked("1", None).content) == "x.jsonl, row 2: no answer"
    assert read_checked(checked(None, None).content) == "prompt 'p0': no answer"
    assert checked("crash").status_code == 500
    assert client.post(CHECK_PATH, content=b"{}").status_code == 400


@pytest.mark.parametrize(
    ("host", "length", "taken"), [("0.0.0.0", 15, False), ("0.0.0.0", 16, True), ("127.0.0.1", 1, True)]
)
def test_a_token_that_could_be_guessed_is_refused_where_others_can_try(
    host: str, length: int, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REWARD_TOKEN", "k" * length)
    if taken:
        check_options(host, token_env="REWARD_TOKEN", without_token=False)
        return
    with pytest.raises(ConfigError, match="REWARD_TOKEN has 15 characters: it needs 16 or more"):
        check_options(host, token_env="REWARD_TOKEN", without_token=False)


def test_a_signal_that_comes_before_the_server_hears_signals_ends_it_too() -> None:
    class Starting:
        should_exit = False

        def run(self, sockets: Any) -> None:
            signal.raise_signal(signal.SIGTERM)

    server: Any = Starting()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert serve_reward._run(server, listener) == 128 + signal.SIGTERM
    assert server.should_exit
