"""Drawings that can stand in one page, in light and dark, and stay small."""

import json
import random
import re
from html.parser import HTMLParser

import matplotlib as mpl
import pytest

from proximo.metrics.definitions import Curve, Style, Trace
from proximo.metrics.report import plots
from proximo.metrics.report.plots import Plot, downsampled, draw_curve, smoothed
from proximo.metrics.report.svg import figure_to_svg
from proximo.metrics.run_files import Run, Series
from proximo.ppo.kind import PPO
from proximo.trainer_kinds import trainer_kinds

CURVE = Curve("score", "Score <of & all>", "score", guide=0.0).draws(
    Trace("score/mean", "training"),
    Trace("evaluation/score", "held out", Style.POINTS),
    healthy="Rises.",
)
SVG = '<svg viewBox="0 0 1 1"></svg>'
TIME = next(curve for curve in PPO.metrics.curves if curve.key == "time")


def run_of(num_steps: int, *names: str) -> Run:
    rng = random.Random(1)
    return Run(
        name="run",
        lines=tuple({"step": step} | {name: rng.gauss(0, 1) + 5 for name in names} for step in range(num_steps)),
    )


def drawn(curve: Curve, run: Run, key: str = "a") -> Plot:
    plot = draw_curve(curve, run, key=key)
    assert plot is not None
    return plot


def ids(svg: str) -> list[str]:
    return re.findall(r'\bid="([^"]+)"', svg)


class Balance(HTMLParser):
    """Fails on a tag that is closed out of turn."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_startendtag(self, tag, attrs): ...

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_same_run_gives_the_same_bytes():
    run = run_of(50, "score/mean")
    first = draw_curve(CURVE, run, key="a")
    plots._drawing.cache_clear()
    assert draw_curve(CURVE, run, key="a") == first


def test_a_curve_that_was_drawn_is_not_drawn_again_for_another_page(monkeypatch):
    plots._drawing.cache_clear()
    figures = []
    monkeypatch.setattr(plots, "figure_to_svg", lambda figure: figures.append(figure) or figure_to_svg(figure))
    first, again = (drawn(CURVE, run_of(300, "score/mean"), key) for key in ("a", "b"))
    assert len(figures) == 1
    assert first.svg.replace("a-", "b-") == again.svg.replace("a-", "b-")
    draw_curve(CURVE, run_of(299, "score/mean"), key="a")
    assert len(figures) == 2


@pytest.mark.parametrize("num_steps", [1, 30, 20_000])
def test_a_run_of_any_length_gives_a_small_drawing(num_steps):
    names = [trace.name for trace in TIME.traces]
    for curve, size in ((CURVE, 40_000), (TIME, 110_000)):  # of eleven lines
        plot = drawn(curve, run_of(num_steps, "score/mean", "evaluation/score", *names))
        assert len(plot.svg.encode()) < size


def test_two_drawings_in_a_page_share_no_id_and_refer_to_their_own():
    run = run_of(50, "score/mean", "evaluation/score")
    first, second = drawn(CURVE, run), drawn(CURVE, run, "b")
    both = ids(first.svg) + ids(second.svg)
    assert both
    assert len(both) == len(set(both))
    for svg in (first.svg, second.svg):
        assert set(re.findall(r'(?:url\(|href=")#([^")]+)', svg)) == set(ids(svg))


@pytest.mark.parametrize("curve", [CURVE, TIME])
def test_a_drawing_has_text_as_text_colours_of_the_page_and_nothing_outside_itself(curve):
    assert draw_curve(curve, run_of(9, "kl/sequence"), key="a") is None
    svg = drawn(curve, run_of(50, "score/mean", "evaluation/score", "time/score_seconds")).svg
    assert ">step</text>" in svg
    assert "var(--c" in svg
    assert not re.findall(r"#[0-9a-f]{6}\b", svg)
    assert not [word for word in ("http", "<metadata", "<style", "<of") if word in svg]
    parser = Balance()
    parser.feed(svg)
    assert parser.open == []


def test_small_numbers_on_an_axis_are_not_rounded_with_the_coordinates():
    lines = tuple({"step": step, "score/mean": 0.0001 * step} for step in range(1, 4))
    plot = drawn(CURVE, Run(name="run", lines=lines))
    assert "0.0002</text>" in plot.svg


def test_components_become_a_trace_each():
    curve = next(curve for curve in PPO.metrics.curves if curve.key == "components")
    plot = drawn(curve, run_of(5, "score/warmth/mean", "score/form/mean", "score/mean"))
    assert plot.legend == ((1, "form"), (2, "warmth"))


def test_an_early_outlier_does_not_flatten_the_rest():
    curve = next(curve for curve in PPO.metrics.curves if curve.key == "explained")
    lines = tuple({"step": step, "value/explained_variance": -400.0 if step == 0 else 0.5} for step in range(9))
    plot = drawn(curve, Run(name="run", lines=lines))
    assert "-400" not in re.sub(r"<[^>]*>", "", plot.svg)


def test_the_users_own_matplotlib_settings_neither_leak_in_nor_are_lost():
    run = run_of(9, "score/mean")
    plain = draw_curve(CURVE, run, key="a")
    with mpl.rc_context({"font.size": 30, "svg.fonttype": "path", "lines.dash_capstyle": "round", "axes.linewidth": 9}):
        assert draw_curve(CURVE, run, key="a") == plain
        assert mpl.rcParams["font.size"] == 30


def test_buckets_keep_the_mean_and_the_order():
    series = Series(tuple(range(1000)), tuple(float(step) for step in range(1000)))
    thin = downsampled(series, 40)
    assert len(thin) == 40
    assert sum(thin.values) / 40 == pytest.approx(499.5)
    assert list(thin.steps) == sorted(thin.steps)


def test_smoothing_takes_noise_away_also_at_the_ends_and_leaves_a_straight_line_as_it_is():
    rng = random.Random(3)
    series = Series(tuple(range(160)), tuple(rng.gauss(0, 1) for _ in range(160)))
    smooth = smoothed(series).values
    assert max(abs(value) for value in smooth) < 0.75 * max(abs(value) for value in series.values)
    straight = Series(tuple(range(100)), tuple(3.0 - 0.5 * step for step in range(100)))
    assert smoothed(straight).values == pytest.approx(straight.values)


def strokes(svg: str) -> list[str]:
    """The paths of the curves themselves."""
    return re.findall(r'<path d="([^"]+)"[^>]*clip-path[^>]*stroke: var\(--c1\)', svg)


@pytest.mark.parametrize("style", list(Style))
def test_two_measurements_are_points_and_three_are_joined(style):
    for num_steps, joined in ((1, False), (2, False), (3, True)):
        curve = Curve("k", "t", "u").draws(
            Trace("score/mean", "", style),
            healthy="",
        )
        plot = drawn(curve, run_of(num_steps, "score/mean"))
        assert bool(strokes(plot.svg)) == joined, num_steps
        assert joined or plot.svg.count("<use") >= num_steps


def test_a_share_is_drawn_from_0_to_1(monkeypatch):
    """Whatever it was: 0.98 and 0.99 are nearly the same."""
    limits = []
    monkeypatch.setattr(plots, "figure_to_svg", lambda figure: limits.append(figure.axes[0].get_ylim()) or SVG)
    plots._drawing.cache_clear()
    shares = [curve for trainer in trainer_kinds() for curve in trainer.metrics.curves if curve.share]
    keys = {"clip", "finished", "distinct", "groups", "accuracy", "errors", "means", "auc", "desirable-fraction"}
    assert {curve.key for curve in shares} == keys
    for curve in shares:
        lines = tuple({"step": step, curve.traces[0].name: 0.98 + 0.001 * step} for step in range(9))
        assert draw_curve(curve, Run(name="run", lines=lines), key="a") is not None
    plots._drawing.cache_clear()
    assert set(limits) == {(-0.03, 1.03)}


def test_text_is_at_least_12_pixels_high_on_a_narrow_phone(tmp_path):
    """A page of 320 pixels leaves what its style sheet says to a picture, which is as wide as its view box."""
    plot = drawn(CURVE, run_of(50, "score/mean"))
    width = float(re.search(r'viewBox="0 0 ([0-9.]+)', plot.svg).group(1))
    sizes = [float(size) for size in re.findall(r"font(?:-size)?: ?([0-9.]+)px", plot.svg)]
    assert sizes
    assert min(sizes) * (320 - 2 * (10 + 1 + 8)) / width >= 11.9


@pytest.mark.parametrize("style", list(Style))
def test_the_readout_places_each_point_where_the_drawing_has_it(style):
    """So that report.js, which knows the readout alone, marks the line itself."""
    curve = Curve("k", "", "", view=(-9.0, 3.0)).draws(
        Trace("a/b", "label", style),
        healthy="",
    )
    lines = tuple({"step": step, "a/b": value} for step, value in ((2, 1.5), (5, -1.0), (6, 0.25), (11, 2.0)))
    plot = drawn(curve, Run(name="run", lines=lines))
    found = json.loads(plot.readout)
    (series,) = found["series"]
    assert (series["label"], series["colour"], series["x"], series["mean_of"]) == ("label", 1, [2, 5, 6, 11], 1)
    left, top, right, bottom = found["box"]
    places = [
        (
            left + (x - found["x"][0]) / (found["x"][1] - found["x"][0]) * (right - left),
            bottom - (y - found["y"][0]) / (found["y"][1] - found["y"][0]) * (bottom - top),
        )
        for x, y in zip(series["x"], series["y"], strict=True)
    ]
    stroke = re.findall(r"[ML] (\S+) (\S+)", strokes(plot.svg)[0])
    assert [part for place in places for part in place] == pytest.approx(
        [float(part) for each in stroke for part in each], abs=0.2
    )


def test_the_readout_of_a_long_run_has_the_means_that_are_drawn():
    plot = drawn(CURVE, run_of(1000, "score/mean", "evaluation/score"))
    training, held_out = json.loads(plot.readout)["series"]
    assert (len(training["y"]), training["mean_of"]) == (plots.MAX_POINTS[Style.LINE], 7)
    assert (len(held_out["y"]), held_out["mean_of"]) == (plots.MAX_POINTS[Style.POINTS], 17)
    shown = downsampled(
        run_of(1000, "score/mean", "evaluation/score").series("score/mean"), plots.MAX_POINTS[Style.LINE]
    )
    assert (training["x"], training["y"]) == (list(shown.steps), pytest.approx(shown.values, rel=1e-5))
