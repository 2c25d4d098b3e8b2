"""What a person sees while a run goes on."""

import errno
import io
import sys
from typing import Any

import pytest
from rich.console import Console

from proximo.message_text import format_change, format_duration, format_number
from proximo.metrics.console import (
    LoggedProgress,
    NotebookProgress,
    PlainProgress,
    ProgressInfo,
    ProgressView,
    TerminalProgress,
    open_progress,
)
from proximo.ppo.kind import PPO
from proximo.supervised.kinds import SFT

LINE = {
    "score/mean": 1.234,
    "kl/sequence": 3.1,
    "response/tokens_mean": 45.21,
    "policy/entropy": 2.05,
    "policy/clip_fraction": 0.0512,
    "throughput/rollout_tokens_per_second": 4321.0,
    "value/loss": 99.0,
}


NUMBERS = {
    None: "-", 0: "0", -1.0: "-1.00", 5: "5", 64.0: "64", 12345.6: "12,346", 123.4: "123", 45.21: "45.2", 0.5: "0.50",
    0.0512: "0.051", 0.0051: "0.0051", 0.0015: "0.0015", 3e-6: "3.0e-06", -1e300: "-1.0e+300", float("nan"): "nan",
}  # fmt: skip


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def info(clock: FakeClock | None = None, *, total_steps: int = 10, first_step: int = 0) -> ProgressInfo:
    return ProgressInfo(trainer=PPO, total_steps=total_steps, first_step=first_step, clock=clock or FakeClock())


def opened(of: ProgressInfo | None = None, **options: Any) -> tuple[Any, io.StringIO]:
    """A view that writes to a file, and the file."""
    stream = io.StringIO()
    return open_progress(of or info(), console=Console(file=stream, width=60), **options), stream


def test_without_a_terminal_each_step_is_one_plain_line():
    clock = FakeClock()
    view, stream = opened(info(clock))
    assert isinstance(view, PlainProgress)
    clock.now += 20
    view.write(1, LINE)
    clock.now += 20
    view.write(2, LINE)
    view.close()
    assert stream.getvalue().splitlines() == [
        "step 1/10  score 1.23  kl 3.10  length 45.2  entropy 2.05  clipped 0.051  tokens/s 4,321  3m00s left",
        "step 2/10  score 1.23  kl 3.10  length 45.2  entropy 2.05  clipped 0.051  tokens/s 4,321  2m40s left",
    ]


@pytest.mark.parametrize("trainer", [SFT, PPO])
def test_updates_that_were_skipped_are_said_in_the_line_of_their_step(trainer) -> None:
    view, stream = opened(ProgressInfo(trainer=trainer, total_steps=10))
    group = "sft" if trainer is SFT else "policy"
    for step, skipped in ((1, 0), (2, 3)):
        view.write(step, {f"{group}/skipped_updates": skipped, "sft/learning_rate": 1e-3})
    first, second = stream.getvalue().splitlines()
    assert "skipped" not in first
    assert "  skipped updates 3" in second


def test_a_line_before_the_first_step_says_something_or_is_left_out() -> None:
    view, stream = opened()
    view.write(0, {"value/loss": 1.0})
    view.phase("training")
    assert stream.getvalue() == "step 1/10: training\n"


def test_plain_lines_hold_no_control_characters():
    view, stream = opened()
    view.write(1, LINE)
    view.note("saved [bold]step 1[/bold]")
    view.warn("the ratio is odd")
    view.close()
    assert "\x1b" not in stream.getvalue()
    assert "saved [bold]step 1[/bold]\nwarning: the ratio is odd\n" in stream.getvalue()


def test_the_time_left_counts_the_steps_of_this_process_only():
    clock = FakeClock()
    resumed = info(clock, first_step=8)
    started = clock()
    clock.now += 30
    assert resumed.seconds_left(9, started) == 30
    assert resumed.seconds_left(8, started) is None


def test_an_evaluation_before_training_does_not_enter_the_time_left():
    clock = FakeClock()
    view, stream = opened(info(clock))
    clock.now += 500
    view.write(0, {"evaluation/score": 0.5})
    clock.now += 20
    view.write(1, LINE)
    assert stream.getvalue().splitlines()[1].endswith("  3m00s left")


def test_quiet_shows_warnings_only_and_each_once():
    view, stream = opened(quiet=True)
    assert type(view) is ProgressView
    view.write(1, LINE)
    view.note("saved")
    for _ in range(3):
        view.warn("2 updates were skipped")
    view.close()
    assert stream.getvalue() == "warning: 2 updates were skipped\n"


def test_a_terminal_gets_a_live_view_with_the_numbers_that_matter():
    stream = io.StringIO()
    view = open_progress(info(), console=Console(file=stream, force_terminal=True, width=200))
    assert isinstance(view, TerminalProgress)
    try:
        view.phase("rollout [1/2]")
        view.write(1, LINE | {"evaluation/score": 7.77})
        print("a library says hello", file=sys.stderr)
        view.warn("odd")
        view.warn("odd")
        view.write(2, LINE)
    finally:
        view.close()
    shown = stream.getvalue()
    assert {word for word in ("step 1/10", "entropy", "a library says hello", "value/loss") if word in shown} == {
        "step 1/10", "entropy", "a library says hello"
    }  # fmt: skip
    assert shown.count("warning: odd") == 1
    assert "7.77" in shown.split("step 2/10")[-1], "a number that is measured now and then stays"


@pytest.mark.parametrize(
    ("first_step", "wanted"),
    [(0, ["0/9: evaluation", "1/9: training", "1/9: sampling"]), (4, ["5/9: training", "5/9: sampling"])],
)
def test_plain_lines_say_each_phase_when_it_first_begins(first_step: int, wanted: list[str]) -> None:
    """Else a pipe shows nothing for as long as it takes."""
    view, stream = opened(ProgressInfo(trainer=PPO, total_steps=9, first_step=first_step))
    if not first_step:
        view.phase("evaluation")
        view.write(0, {})
    for step in range(first_step + 1, 10):
        for name in ("training", "sampling", "sampling"):
            view.phase(name)
        view.write(step, {})
    view.phase("report")
    said = [line for line in stream.getvalue().splitlines() if ": " in line]
    assert said == [f"step {line}" for line in (*wanted, "9/9: report")]


@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_have_about_three_digits(number):
    assert format_number(number) == NUMBERS[number]


def test_changes_have_a_sign_and_durations_are_short():
    pairs = ((1.0, 1.5), (1.5, 1.0), (1.5, 1.5), (None, 1.0))
    assert [format_change(*pair) for pair in pairs] == ["+0.50", "-0.50", "0", ""]
    assert [format_duration(x) for x in (0, 59.4, 185, 7620, 273600)] == ["0s", "59s", "3m05s", "2h07m", "3d04h"]


def test_what_float32_rounds_to_is_no_kl_and_no_entropy():
    """A learning rate may well be as small."""
    assert format_number(-2.6e-9, "nats") == format_number(-0.0, "nats per token") == "0"
    assert format_number(2.6e-9, "per update") == "2.6e-09"
    stream = io.StringIO()
    view = PlainProgress(ProgressInfo(trainer=PPO, total_steps=1), Console(file=stream))
    view.write(1, {"kl/sequence": -2.6e-9, "policy/entropy": -0.0})
    assert "kl 0  entropy 0" in stream.getvalue()


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), BrokenPipeError()])
def test_a_terminal_or_a_reader_that_went_away_does_not_end_the_run(error, monkeypatch):
    """The save that the signal asked for is still to come."""
    tried = []

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            tried.append(text)
            raise error

    monkeypatch.setattr(sys, "stderr", Gone())
    info = ProgressInfo(trainer=SFT, total_steps=1)
    for view in (open_progress(info), TerminalProgress(info, open_progress(info)._console)):
        view.note("lost")
        view.warn("lost")
        view.write(1, {"sft/loss": 1.0})
        view.close()
    assert tried


@pytest.fixture
def cell(monkeypatch) -> list[str]:
    """What the output of a notebook's cell showed, one view after the other."""
    shown: list[str] = []

    class Handle:
        def update(self, view) -> None:
            shown.append(view._repr_mimebundle_(include=(), exclude=())["text/plain"])

    def display(view, *, display_id: bool = False) -> Handle:
        if display_id:
            Handle().update(view)
        return Handle()

    monkeypatch.setattr("IPython.display.display", display)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    return shown


def test_a_notebook_has_one_output_that_is_drawn_at_most_four_times_a_second(cell):
    clock = FakeClock()
    view = open_progress(info(clock), console=Console())
    assert isinstance(view, NotebookProgress)
    for step in range(1, 10):
        clock.now += 0.125
        view.phase("rollout")
        view.write(step, LINE)
    assert len(cell) == 1 + 5, "the start, and each second step"
    assert "step 8/10" in cell[-1]
    assert "4,321" in cell[-1]
    view.write(10, LINE)
    assert "step 10/10" not in cell[-1]
    view.close()
    assert "step 10/10" in cell[-1]


def test_the_log_is_written_in_a_notebook_too_and_a_quiet_run_shows_nothing(cell, tmp_path):
    """rich shows the lines of any console in the cell, and writes none to its file."""
    logged = LoggedProgress(info(), tmp_path / "log.txt", NotebookProgress(info(), Console()))
    logged.write(1, {"score/mean": 0.5})
    logged.close()
    assert (tmp_path / "log.txt").read_text().startswith("step 1/10  score 0.50")
    cell.clear()
    assert type(open_progress(info(), console=Console(), quiet=True)) is ProgressView
    assert cell == []
