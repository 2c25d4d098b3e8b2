"""`proximo report --follow`: the page is written again while a run goes on, and once more when it has ended."""

import json
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from proximo.cli import main
from proximo.commands import report
from proximo.commands.report import FOLLOW_SECONDS, REST, followed_report
from proximo.errors import RunFolderError, UserError

HOSTILE = '<script>alert("x")</script>'
RELOADS = f'<body data-reload="{FOLLOW_SECONDS}">'


def write(run: Path, num_steps: int, **outcome: Any) -> None:
    run.mkdir(parents=True, exist_ok=True)
    lines = [{"step": step, "sft/loss": 2.0 / step, "time/step_seconds": 3.0} for step in range(1, num_steps + 1)]
    newest = {"step": num_steps, "kind": "train", "prompt_id": "p", "prompt": HOSTILE, "response": f"at {num_steps}"}
    (run / "samples.jsonl").write_text(json.dumps(newest) + "\n")
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if outcome:
        (run / "outcome.json").write_text(json.dumps({"total_steps": 40, **outcome}))


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[float]]:
    """Make each rest do the next of the given things, instead of taking time; returns the seconds asked for."""
    monkeypatch.setattr("os.nice", lambda increment: increment)

    def plan(*events: Callable[[], None]) -> list[float]:
        asked, left = list[float](), iter(events)

        def rest(seconds: float) -> None:
            asked.append(seconds)
            next(left)()

        monkeypatch.setattr(report.time, "sleep", rest)
        return asked

    return plan


def pages(run: Path) -> Iterator[tuple[str, bool]]:
    for made in followed_report(run):
        yield made.page.read_text(), made.follows


def test_the_page_is_written_when_something_was_logged_and_ends_with_the_run(tmp_path: Path, rests: Any) -> None:
    run = tmp_path / "sft"
    run.mkdir()
    asked = rests(
        lambda: write(run, 3),
        lambda: None,
        lambda: write(run, 7),
        lambda: write(run, 8, state="failed", reason=f"no disk {HOSTILE}"),
    )
    (first, goes_on), (second, _), (last, goes_on_at_end) = pages(run)
    assert (goes_on, goes_on_at_end) == (True, False)
    for page, steps in ((first, 3), (second, 7)):
        assert RELOADS in page
        assert f"at {steps}" in page
        assert "<svg" in page
    assert "data-reload=" not in last.partition("<script>")[0]
    assert 'http-equiv="refresh"' in first
    assert 'http-equiv="refresh"' not in last
    assert "no disk &lt;script&gt;" in last
    assert first.count("<script") == last.count("<script") == 1
    assert len(asked) == 4
    assert min(asked) >= FOLLOW_SECONDS


def test_it_rests_ten_times_as_long_as_it_drew(tmp_path: Path, rests: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "sft", 3)
    clock = count(0.0, 20.0)  # each reading of the clock is 20 s after the one before
    monkeypatch.setattr(report.time, "process_time", lambda: next(clock))
    asked = rests(lambda: write(tmp_path / "sft", 4, state="finished"))
    assert len(list(pages(tmp_path / "sft"))) == 2
    assert asked == [REST * 20.0]


def test_a_pipeline_ends_with_its_last_stage(tmp_path: Path, rests: Any) -> None:
    write(tmp_path / "sft", 2, state="finished")
    rests(lambda: write(tmp_path / "ppo", 1), lambda: write(tmp_path / "ppo", 2, state="finished"))
    found = list(pages(tmp_path))
    assert [follows for _, follows in found] == [True, True, False]
    assert [page.count('<section class="stage"') for page, _ in found] == [1, 2, 2]
    write(tmp_path / "ppo", 2, state="stopped")
    assert [follows for _, follows in pages(tmp_path)] == [False]


def test_ctrl_c_leaves_a_page_that_does_not_load_itself_again(
    tmp_path: Path, rests: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "sft", 2)

    def interrupt() -> None:
        assert RELOADS in (tmp_path / "sft" / "report.html").read_text()
        raise KeyboardInterrupt

    rests(interrupt)
    assert main(["report", str(tmp_path / "sft"), "--follow"]) == 130
    said = capsys.readouterr()
    assert said.out == f"{tmp_path / 'sft' / 'report.html'}\n"
    assert f"following {tmp_path / 'sft'}; Ctrl-C ends this" in said.err
    assert RELOADS not in (tmp_path / "sft" / "report.html").read_text()


def test_a_run_that_is_over_is_reported_once_and_its_alarms_told(
    tmp_path: Path, rests: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "sft", 2, state="finished")
    rests()
    out = tmp_path / "elsewhere.html"
    assert main(["report", str(tmp_path / "sft"), "--follow", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert RELOADS not in out.read_text()
    assert not (tmp_path / "sft" / "report.html").exists()


def test_a_page_of_somebody_else_is_not_replaced(tmp_path: Path) -> None:
    write(tmp_path / "sft", 2)
    (tmp_path / "mine.html").write_text("mine")
    with pytest.raises(UserError, match="is not a page of Proximo"):
        next(followed_report(tmp_path / "sft", tmp_path / "mine.html"))
    assert (tmp_path / "mine.html").read_text() == "mine"


def test_a_folder_that_is_not_there_is_not_followed(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="none is not a folder"):
        next(pages(tmp_path / "none"))
