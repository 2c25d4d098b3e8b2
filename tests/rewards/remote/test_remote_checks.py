"""What a client asks a reward service before a run: whether it is there, and whether rows can be graded."""

import logging
from pathlib import Path
from typing import Any

import pytest
from reward_services import OPENED, ScriptedService, good, grades, real_service, reply, silent

from proximo.errors import ConfigError, DataError
from proximo.rewards import remote
from proximo.rewards.protocol import checked_body, read_check
from proximo.rewards.remote import RemoteLimits, RemoteReward
from proximo.rewards.source import CheckingSource
from records_made import prompt

ROWS = [prompt("a", answer="4", metadata={"level": [1, None]}), prompt("b"), prompt("c", answer="5")]
ORIGINS = {"a": "x.jsonl, row 1", "b": "x.jsonl, row 2", "c": "x.jsonl, row 3"}


def source(url: str, **limits: Any) -> RemoteReward:
    made = RemoteReward(url, name="far", limits=RemoteLimits(initial_backoff_seconds=0.01, **limits))
    OPENED.append(made)
    assert isinstance(made, CheckingSource)
    return made


def test_a_service_that_accepts_and_never_answers_is_given_up_soon_after_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "CHECK_SECONDS", 0.3)
    refused = pytest.raises(ConfigError, match="no reward service answers at .* .no complete reply within 0")
    with ScriptedService(silent) as service, refused:
        source(service.url, request_seconds=600, step_seconds=600).check()


def test_rows_are_asked_about_in_parts_with_their_places_and_the_first_problem_is_raised() -> None:
    asked: list[bytes] = []

    def check(connection: Any, count: int) -> None:
        problem = None if len(asked) == 1 else "x.jsonl, row 3: no tests"
        reply(checked_body(problem))(connection, count)

    with ScriptedService(good, check=check) as service:
        made = source(service.url, responses_per_request=2)
        send = made._client.send
        made._client.send = lambda *given, **more: asked.append(given[2]) or send(*given, **more)  # ty: ignore
        with pytest.raises(
            DataError, match=r"^x.jsonl, row 3: no tests \(reported by the service of reward source 'far'\)"
        ):
            made.check_prompts(ROWS, ORIGINS)
    (first, second) = (read_check(body) for body in asked)
    assert [each.answer for each in first[0]] == ["4", None]
    assert first[0][0].metadata == {"level": [1, None]}
    assert first[1] == {"0": "x.jsonl, row 1", "1": "x.jsonl, row 2"}
    assert second[1] == {"0": "x.jsonl, row 3"}


@pytest.mark.parametrize(
    "behaviour",
    [
        reply(b"", "404 Not Found"),
        reply(b"", "405 Method Not Allowed"),
        reply(b'{"detail": "what?"}', "400 Bad Request"),
        reply(grades([])),
        reply(b"", "500 No"),
        silent,
    ],
)
def test_a_service_that_checks_no_rows_passes_them(behaviour: Any) -> None:
    with ScriptedService(good, check=behaviour) as service:
        source(service.url, attempts=2, request_seconds=0.3).check_prompts(ROWS, ORIGINS)


def test_a_failing_check_is_said_and_rows_that_are_too_large_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    with ScriptedService(good, check=reply(b"", "500 No")) as service, caplog.at_level(logging.WARNING):
        source(service.url, attempts=2).check_prompts(ROWS, ORIGINS)
    assert "far: its service does not check the rows: status 500, at attempt 2" in caplog.text
    with ScriptedService(good, check=reply(b"", "413 Too Large")) as service:
        made = source(service.url)
        with pytest.raises(ConfigError, match="lower responses_per_request"):
            made.check_prompts(ROWS, ORIGINS)


def test_the_real_service_names_the_row_that_its_verifier_could_say_nothing_about(tmp_path: Path) -> None:
    (tmp_path / "rewards.yaml").write_text("reward: [{kind: maths, name: sums, workers: 1}]")
    with real_service(tmp_path) as service:
        made = source(service.url)
        made.check_prompts([ROWS[0], ROWS[2]], ORIGINS)
        with pytest.raises(DataError, match=r"^x.jsonl, row 2: reward source 'sums': .*has none \(column `answer`\)"):
            made.check_prompts(ROWS, ORIGINS)
