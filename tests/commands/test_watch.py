"""The live page over HTTP: what it answers, to whom, and what it says of a run that comes, goes on and ends."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from metrics.made_up_runs import write_ppo_run
from proximo.commands import watch
from proximo.commands.watch import serving
from proximo.errors import ConfigError, RunFolderError
from proximo.metrics.report import live
from proximo.metrics.report.live import LivePage, run_status
from proximo.metrics.report.page import report_page
from proximo.metrics.run_files import Outcome, Run, read_run

HOSTILE = '<script>alert("x")</script>'
DEADLINE_SECONDS = 600


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "sft"


@pytest.fixture
def address(run: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[str]:
    monkeypatch.setattr(live, "REST", 0)
    with serving(LivePage(run)) as served:
        yield served


def write(run: Path, num_steps: int, **more: Any) -> None:
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.resolved.json").write_text(json.dumps({"sft": {"num_steps": 40}, "note": HOSTILE}))
    lines = [{"step": step, "sft/loss": 2.0 / step, "time/step_seconds": 3.0} for step in range(1, num_steps + 1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    newest = {"step": num_steps, "kind": "train", "prompt_id": "p", "prompt": HOSTILE, "response": f"at {num_steps}"}
    (run / "samples.jsonl").write_text(json.dumps(newest) + "\n")
    if more:
        (run / "outcome.json").write_text(json.dumps(more))


def ask(
    address: str, path: str, *, method: str = "GET", host: str | None = None, cookie: str | None = None
) -> tuple[int, Mapping[str, str], str]:
    """Status, headers and text of an answer. Without a cookie the token of the address goes with the path."""
    if cookie is None:
        path = f"{path}{'&' if '?' in path else '?'}{urlsplit(address).query}"
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=DEADLINE_SECONDS)
    connection.putrequest(method, path, skip_host=host is not None)
    if host is not None:
        connection.putheader("Host", host)
    if cookie is not None:
        connection.putheader("Cookie", cookie)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read().decode()
    connection.close()
    return found


def state(address: str, seen: str = "") -> dict[str, Any]:
    status, headers, text = ask(address, f"/state?seen={seen}")
    assert (status, headers["Content-Type"]) == (200, "application/json; charset=utf-8")
    return json.loads(text)


def test_the_page_follows_a_run_from_before_it_is_there_to_its_end(run: Path, address: str) -> None:
    first = state(address)
    assert (first["kind"], first["share"]) == ("waiting", None)
    assert first["words"].endswith("runs/sft is no folder yet")
    write(run, 3)
    going = state(address, first["version"])
    assert re.fullmatch(r"running: step 3 of 40; about 1m51s left; last written \d+s ago", going["words"])
    assert (going["kind"], going["share"]) == ("running", 3 / 40)
    assert "at 3" in going["main"]
    assert "<svg" in going["main"]
    assert state(address, going["version"])["main"] is None
    write(run, 7)
    later = state(address, going["version"])
    assert later["version"] != going["version"]
    assert "at 7" in later["main"]
    write(run, 8, state="failed", total_steps=40, reason=f"no disk {HOSTILE}")
    ended = state(address, later["version"])
    assert (ended["kind"], ended["words"]) == ("failed", "failed after step 8 of 40")
    assert "no disk &lt;script&gt;" in ended["main"]
    status, _, page = ask(address, "/")
    assert status == 200
    assert ended["main"] in page
    assert page.count("<script") == 1


def test_only_the_page_can_be_asked_for_and_only_read(run: Path, address: str) -> None:
    write(run, 2)
    before = {path: path.read_bytes() for path in run.rglob("*")}
    for path in (
        "/metrics.jsonl",
        "/../metrics.jsonl",
        "/%2e%2e/metrics.jsonl",
        "//etc/passwd",
        "/state/x",
        "/index.html",
    ):
        status, _, text = ask(address, path)
        assert (status, text) == (404, "there is nothing but the page at /\n"), path
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(address, "/", method=method)[0] == 501
    ask(address, "/")
    assert {path: path.read_bytes() for path in run.rglob("*")} == before


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:1", 200),
        ("localhost:8080", 200),
        ("localhost", 200),
        ("evil.example:80", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example:80", 403),
        ("", 403),
    ],
)
def test_a_name_that_was_made_to_mean_this_machine_is_refused(address: str, host: str, status: int) -> None:
    """DNS rebinding; other ports are those of a tunnel."""
    for path in ("/", "/state"):
        assert ask(address, path, host=host)[0] == status


def test_the_page_is_for_this_machine_and_this_origin_alone(address: str) -> None:
    assert urlsplit(address).hostname == "127.0.0.1"
    _, headers, _ = ask(address, "/")
    assert "Access-Control-Allow-Origin" not in headers
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert headers["Cache-Control"] == "no-store"
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "connect-src 'self'; frame-ancestors 'none'" in policy
    assert "Python" not in headers["Server"]


def test_work_rests_by_the_time_that_it_took(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "REST", 1e9)
    page = LivePage(run)
    write(run, 2)
    first = page.state("")
    write(run, 3)
    again = page.state(first["version"])
    assert again["main"] is None
    assert again["words"].startswith("running: step 2 of 40")


def lines(*seconds: float) -> tuple[Mapping[str, float], ...]:
    return tuple({"step": step, "time/step_seconds": took} for step, took in enumerate(seconds, 1))


@pytest.mark.parametrize(
    ("run", "quiet", "kind", "words"),
    [
        (Run(name="r"), 899, "running", "running: before the first step; last written 14m59s ago"),
        (Run(name="r"), 901, "quiet", "before the first step; nothing was written for 15m01s: the run may hang, or"),
        (Run(name="r", lines=lines(2, 2)), 119, "running", "running: step 2; last written 1m59s ago"),
        (Run(name="r", lines=lines(2, 2)), 121, "quiet", "step 2; nothing was written for 2m01s"),
        (Run(name="r", lines=lines(90, 60), total_steps=4), 449, "running", "step 2 of 4; about 2m30s left"),
        (Run(name="r", lines=lines(90, 60), total_steps=4), 451, "quiet", "step 2 of 4; nothing was written"),
        (Run(name="r", lines=lines(1), outcome=Outcome(state="finished", total_steps=1)), 9999, "ended", "finished"),
        (Run(name="r", lines=lines(1), outcome=Outcome(state="stopped", total_steps=9)), 9999, "ended", "--resume"),
    ],
)
def test_a_run_is_quiet_when_it_writes_nothing_for_several_of_its_steps(
    run: Run, quiet: float, kind: str, words: str
) -> None:
    status = run_status(run, quiet_seconds=quiet)
    assert status.kind == kind
    assert words in status.words


def test_of_a_pipeline_the_stage_that_wrote_last_is_told(tmp_path: Path) -> None:
    for name, age in (("sft", 100), ("ppo", 5)):
        write(tmp_path / name, 4)
        for file in (tmp_path / name).iterdir():
            os.utime(file, (time.time() - age, time.time() - age))
    (tmp_path / "sft" / "outcome.json").write_text(json.dumps({"state": "finished", "total_steps": 4}))
    os.utime(tmp_path / "sft" / "outcome.json", (time.time() - 100, time.time() - 100))
    page = LivePage(tmp_path)
    assert page.state("")["words"].startswith("SFT: running: step 4 of 40")
    assert page.page().count('<section class="stage"') == 2


def test_nobody_reads_the_page_without_its_token(run: Path, address: str) -> None:
    write(run, 2)
    token = parse_qs(urlsplit(address).query)["token"][0]
    assert len(token) >= 22
    _, headers, _ = ask(address, "/")
    cookie, *attributes = headers["Set-Cookie"].split("; ")
    assert attributes == ["Path=/", "HttpOnly", "SameSite=Strict"]
    name, _, value = cookie.partition("=")
    assert value == token
    wrong = ["", "x=1", f"other={token}", f"{name}=", f"{name}={token[:-1]}", f"{name}={token}x", f"{name}=\u00e9"]
    for path in (
        "/",
        "/state",
        "/state?seen=x&more=1",
        "/?token=",
        f"/?token={token[:-1]}",
        "/?token=%C3%A9",
        "/metrics.jsonl",
    ):
        for given in wrong:
            status, headers, text = ask(address, path, cookie=given)
            assert (status, text) == (403, "open the address that `proximo watch` printed\n"), (path, given)
            assert "Set-Cookie" not in headers
    for given in (cookie, f"a=b; {cookie}; c=d", f"{name}=stale; {cookie}"):
        status, headers, _ = ask(address, "/state", cookie=given)
        assert status == 200
        assert "Set-Cookie" not in headers
    with serving(LivePage(run)) as other:
        assert ask(other, "/", cookie=cookie)[0] == 403
        assert ask(other, "/")[1]["Set-Cookie"].partition("=")[0] != name


def test_more_curves_are_drawn_for_those_who_have_opened_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "REST", 0)
    write_ppo_run(tmp_path / "ppo", num_steps=8)
    page = LivePage(tmp_path / "ppo")
    closed, opened = page.state(""), page.state("", more=True)
    assert '<details class="more"><summary>More curves</summary><p class="quiet">They are drawn' in closed["main"]
    assert '<details class="more"><summary>More curves</summary><div class="cards">' in opened["main"]
    report = report_page([read_run(tmp_path / "ppo")], title="ppo")
    assert opened["main"].count("<figure") == report.count("<figure") > closed["main"].count("<figure")
    assert page.state(opened["version"], more=True)["main"] is None
    assert page.state(opened["version"])["main"] == closed["main"]
    assert page.state(closed["version"])["main"] is None
    assert closed["main"] in page.page()


def test_there_is_no_fold_for_curves_that_the_run_does_not_have(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "REST", 0)
    write(run, 3)
    page = LivePage(run)
    assert "More curves" not in page.state("")["main"] + page.state("", more=True)["main"]


def test_a_port_that_is_taken_is_a_mistake(run: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 cannot be used"),
            serving(LivePage(run), port=port),
        ):
            pass


def test_a_run_that_does_not_come_is_a_mistake_after_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(watch.os, "nice", lambda increment: increment)
    (tmp_path / "x").mkdir()
    with pytest.raises(RunFolderError, match=r"x holds no run yet, after 0.1 s: check its name"):
        watch.watch(tmp_path / "x", wait_seconds=0.1)
    said = capsys.readouterr().out
    assert re.search(r"is shown at http://127.0.0.1:\d+/\?token=[\w-]{22,} \(", said)
    assert "x holds no run yet; this waits 0.1 s for it" in said


def test_ctrl_c_ends_it_with_status_0(run: Path) -> None:
    write(run, 2)
    command = [sys.executable, "-m", "proximo", "watch", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            told = process.stdout.readline()
            found = re.search(r"http://127\.0\.0\.1:\d+/\S+", told)
            assert found is not None, told
            assert state(found[0])["kind"] == "running"
            process.send_signal(signal.SIGINT)
            _, error = process.communicate(timeout=DEADLINE_SECONDS)
        finally:
            process.kill()
    assert (process.returncode, error) == (0, "")
