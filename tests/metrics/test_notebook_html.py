"""What the output cells of notebooks hold: progress in place, tables and cards, and nothing that a model injects."""

from html.parser import HTMLParser

import pytest
from made_up_runs import HOSTILE as MADE_UP_HOSTILE
from made_up_runs import write_ppo_run
from rich.console import Console

from proximo.metrics import console as progress
from proximo.metrics.console import LoggedProgress, NotebookProgress, ProgressInfo, QuietProgress, open_progress
from proximo.metrics.notebook.display import Pace
from proximo.metrics.notebook.html import Column, Table, card_html, page_html, polyline, table_html
from proximo.metrics.report.cells import SAMPLES_SHOWN, Samples, metrics_table, run_card, samples_table
from proximo.metrics.run_files import read_run
from proximo.ppo.kind import PPO

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)></div></style>"


class Tags(HTMLParser):
    """The tags and the text of a piece of HTML, and whether every tag is closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "img":
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if "style" not in self._open:
            self.text += data


class Cell:
    """Keeps what was shown last."""

    def __init__(self) -> None:
        self.shown: list[tuple[str, str]] = []

    def show(self, html: str, text: str) -> None:
        self.shown.append((html, text))

    @property
    def last(self) -> Tags:
        return Tags(self.shown[-1][0])


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    "html",
    [
        table_html(samples_table([{"prompt": HOSTILE, "response": HOSTILE, "score": 1.0, "finish": HOSTILE}])),
        Samples([{"prompt": HOSTILE, "response": HOSTILE}])._repr_html_(),
        table_html(Table(columns={HOSTILE: Column.TEXT}, rows=[[HOSTILE]], title=HOSTILE)),
        progress.progress_html(
            label=HOSTILE, details=[HOSTILE], share=0.5, numbers=[], notes=[("note", HOSTILE), ("warning", HOSTILE)]
        ),
    ],
)
def test_texts_are_escaped(html):
    seen = Tags(html)
    assert not {"script", "img"} & set(seen.tags)
    assert HOSTILE in seen.text
    assert not [name for name, _ in seen.attributes if name.startswith("on")]


def test_a_page_is_shown_in_a_frame_without_scripts():
    page = f'<!DOCTYPE html><p title="a">{HOSTILE}</p>'
    seen = Tags(page_html(page, title=HOSTILE))
    assert seen.tags.count("iframe") == 1
    assert "script" not in seen.tags
    attributes = dict(seen.attributes)
    assert attributes["srcdoc"] == page
    assert attributes["sandbox"] == ""


def test_half_a_surrogate_pair_can_be_sent():
    html = table_html(samples_table([{"prompt": "a", "response": "\ud800 b"}]))
    html.encode()
    assert "? b" in html


def view(clock: FakeClock, *, total_steps: int = 4, first_step: int = 0) -> tuple[NotebookProgress, Cell]:
    cell = Cell()
    info = ProgressInfo(trainer=PPO, total_steps=total_steps, first_step=first_step, clock=clock)
    return NotebookProgress(info, cell=cell), cell


def test_a_notebook_gets_one_output_with_bar_numbers_and_notes():
    clock = FakeClock()
    shown, cell = view(clock)
    shown.note("data: 10 rows")
    shown.phase("training")
    for step, score in enumerate((0.5, 0.75, float("nan")), 1):
        clock.now += 10
        shown.write(step, {"score/mean": score, "kl/sequence": 3.1, "value/loss": 9.0})
    for _ in range(2):
        shown.warn(HOSTILE)
    shown.close()
    last = cell.last
    assert cell.shown[-1][1] == "PPO: step 3/4"
    for text in ("PPO: step 3/4", "10s left", "score", "0.75", "kl", "3.10", "data: 10 rows"):
        assert text in last.text
    assert "9.0" not in last.text
    assert last.text.count(HOSTILE) == 1
    attributes = dict(last.attributes)
    assert attributes["aria-valuenow"] == "75"
    assert ("style", "width: 75.0%") in last.attributes
    assert last.tags.count("polyline") == 2


def test_a_resumed_run_starts_where_it_was():
    shown, cell = view(FakeClock(), first_step=2)
    shown.close()
    assert "step 2/4" in cell.last.text
    assert dict(cell.last.attributes)["aria-valuenow"] == "50"


def test_fast_steps_do_not_flood_the_page_and_the_last_is_shown():
    clock = FakeClock()
    shown, cell = view(clock, total_steps=1000)
    for step in range(1, 1001):
        clock.now += 0.01
        shown.phase("training")
        shown.write(step, {"score/mean": 1.0})
    shown.close()
    assert len(cell.shown) <= 8 + 4 * 10 + 2
    assert cell.shown[-1][1] == "PPO: step 1000/1000"


def test_after_a_rest_a_phase_is_drawn_at_once():
    clock = FakeClock()
    pace = Pace(clock, per_second=1, at_once=2)
    assert [pace.allows() for _ in range(3)] == [True, True, False]
    clock.now += 60
    assert [pace.allows() for _ in range(3)] == [True, True, False]


def test_the_view_is_chosen_by_what_shows_it(monkeypatch):
    info = ProgressInfo(trainer=PPO, total_steps=1)
    monkeypatch.setattr(progress, "UpdatedCell", Cell)
    assert isinstance(open_progress(info, console=Console(force_jupyter=True)), NotebookProgress)
    assert isinstance(open_progress(info, console=Console(force_jupyter=True), quiet=True), QuietProgress)
    assert not isinstance(open_progress(info, console=Console(force_jupyter=False)), NotebookProgress)


def test_the_log_is_written_in_a_notebook_too(monkeypatch, tmp_path):
    """rich shows the lines of any console in the cell, and writes none to its file."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    info = ProgressInfo(trainer=PPO, total_steps=1)
    logged = LoggedProgress(info, tmp_path / "log.txt", NotebookProgress(info, cell=Cell()))
    logged.write(1, {"score/mean": 0.5})
    logged.close()
    assert (tmp_path / "log.txt").read_text().startswith("step 1/1  score 0.50")


def test_a_sparkline_is_scaled_to_its_box_and_keeps_the_ends():
    assert polyline([1.0]) == ""
    assert polyline([0.0, 1.0]) == "0.0,17.0 90.0,1.0"
    assert polyline([2.0, 2.0]) == "0.0,9.0 90.0,9.0"
    points = [tuple(map(float, point.split(","))) for point in polyline([float(n) for n in range(1000)]).split()]
    assert len(points) == 60
    assert (points[0], points[-1]) == ((0.0, 17.0), (90.0, 1.0))


def test_a_run_shows_what_it_is_its_figures_curves_and_samples(tmp_path):
    run = read_run(write_ppo_run(tmp_path / "run", hostile=True))
    html = card_html(run_card(run, folder="runs/mine"))
    seen = Tags(html)
    for text in ("PPO: run", "runs/mine", "before", "after", "Score"):
        assert text in seen.text
    assert seen.tags.count("figure") == 3
    assert not {"script"} & set(seen.tags)
    assert MADE_UP_HOSTILE in seen.text
    assert "details" in seen.tags
    ids = [
        value for name, value in Tags(html + card_html(run_card(run, folder="runs/other"))).attributes if name == "id"
    ]
    assert len(ids) == len(set(ids)) > 0


def test_many_samples_are_counted_and_not_all_shown():
    table = samples_table([{"prompt": "a", "response": "b", "score": 0.25}] * (SAMPLES_SHOWN + 5))
    assert len(table.rows) == SAMPLES_SHOWN
    assert "and 5 more" in table_html(table)
    assert list(table.columns) == ["prompt", "response", "score"]
    assert table.rows[0] == ["a", "b", "0.25"]


def test_metrics_have_their_units():
    assert metrics_table({"kl/sequence": 3.0}).rows == [("kl/sequence", "3.00", "nats")]
