"""What a reward service counts, and what it answers at once: asked in this process, without a network."""

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from starlette.requests import Request

from proximo.errors import DataError, TrainingError
from proximo.records import Response, Scored
from proximo.rewards.protocol import check_body, read_checked, read_reply, request_body
from proximo.rewards.service import RewardService, ServiceLimits
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


def request(body: bytes) -> Request:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


@pytest.mark.parametrize("error", [TrainingError("as expected"), ZeroDivisionError("a surprise"), MemoryError("full")])
def test_a_source_that_raises_whatever_it_may_is_a_status_500_that_is_counted(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(responses: Sequence[Response]) -> list[Scored]:
        raise error

    service = RewardService(Source(failing))
    with caplog.at_level(logging.ERROR):
        answer = asyncio.run(service.score(request(request_body([response()]))))
    assert answer.status_code == 500
    assert "see the log of the service" in json.loads(bytes(answer.body))["detail"]
    assert service.statistics.as_json()["refused"] == {"500": 1}
    assert str(error) in caplog.text
    assert ("Traceback" in caplog.text) is not isinstance(error, TrainingError)


def test_whether_anybody_is_here_is_answered_while_all_turns_are_taken() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(responses: Sequence[Response]) -> list[Scored]:
        begun.set()
        assert go_on.wait(600)
        return fine(responses)

    service = RewardService(Source(slow), limits=ServiceLimits(concurrency=1))

    async def ask() -> tuple[bytes, bytes]:
        asked = asyncio.create_task(service.score(request(request_body([response()]))))
        await asyncio.to_thread(begun.wait, 60)
        try:
            probe = await asyncio.wait_for(service.score(request(request_body(()))), 30)
        finally:
            go_on.set()
        return bytes(probe.body), bytes((await asked).body)

    probe, scored = asyncio.run(ask())
    assert read_reply(probe, []) == []
    assert [each.score for each in read_reply(scored, [response()])] == [1.0]
    assert service.statistics.requests == 1


def test_rows_are_checked_and_a_check_that_crashes_is_counted() -> None:
    service = RewardService(Source(fine))

    def checked(*answers: str | None) -> Any:
        rows = [prompt(f"p{number}", answer=answer) for number, answer in enumerate(answers)]
        body = check_body(rows, {"p1": "x.jsonl, row 2"})
        return asyncio.run(service.check(request(body)))

    assert read_checked(bytes(checked("1", "2").body)) is None
    assert read_checked(bytes(checked("1", None).body)) == "x.jsonl, row 2: no answer"
    assert read_checked(bytes(checked(None, None).body)) == "prompt 'p0': no answer"
    assert checked("crash").status_code == 500
    assert asyncio.run(service.check(request(b"{}"))).status_code == 400
    assert service.statistics.as_json()["refused"] == {"500": 1, "400": 1}
