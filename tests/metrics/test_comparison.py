"""Runs side by side in one page: what differs, figures, alarms, curves and answers."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from made_up_runs import HOSTILE, sample, write_dpo_run, write_lines, write_ppo_run, write_reward_run, write_sft_run
from test_report import Page

from proximo.metrics.definitions import Curve, Section
from proximo.metrics.report.comparison import NamedRun, compared, comparison_page
from proximo.metrics.report.plots import Line, Plot
from proximo.metrics.run_files import read_run

Change = Callable[[dict[str, Any]], Mapping[str, Any]]


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots without a drawing, which takes longer than all the rest. A test of drawings undoes it."""

    def plot(curve: Curve, lines: Sequence[Line], *, key: str) -> Plot:
        return Plot(svg="<svg></svg>", legend=tuple((line.colour, line.label) for line in lines), readout="{}")

    monkeypatch.setattr("proximo.metrics.report.plots.draw_lines", plot)


def named(*folders: Path, stages: bool = False) -> list[NamedRun]:
    return [
        NamedRun(label=folder.name, colour=colour, run=read_run(folder), is_stage=stages)
        for colour, folder in enumerate(folders, 1)
    ]


def ppo_run(
    folder: Path, *, num_steps: int = 20, config: Mapping[str, Any] | None = None, change: Change = dict
) -> Path:
    """A made-up run whose lines and settings can be changed."""
    write_ppo_run(folder, num_steps=num_steps)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    write_lines(folder / "metrics.jsonl", [dict(change(line)) for line in lines])
    if config is not None:
        (folder / "config.resolved.json").write_text(json.dumps(config))
    return folder


def rows(found: Any) -> dict[str, tuple[Any, ...]]:
    return {row.name: row.cells for row in found}


def test_only_the_settings_that_differ_are_shown_by_dotted_key(tmp_path: Path) -> None:
    def settings(folder: str, coefficient: float, **more: Any) -> dict[str, Any]:
        kl = {"coefficient": coefficient, "estimator": "k1"}
        return {"run": {"folder": folder, "seed": 1}, "ppo": {"kl": kl}, "reward": [{"weight": 1.0}], **more}

    first = ppo_run(tmp_path / "a", config=settings("runs/a", 0.05))
    second = ppo_run(tmp_path / "b", config=settings("runs/b", 0.2, note=None))
    third = ppo_run(tmp_path / "c", config=settings("runs/c", 0.05) | {"reward": [{"weight": 1.0}, {"weight": 0.5}]})
    found = compared(named(first, second, third), key="k")
    assert rows(found.settings) == {
        "ppo.kl.coefficient": ("0.05", "0.2", "0.05"),
        "note": (None, "null", None),
        "reward.1.weight": (None, None, "0.5"),
    }


def test_settings_of_the_environment_differ_apart_and_secrets_stay_hidden(tmp_path: Path) -> None:
    first = ppo_run(tmp_path / "a", config={"uri": "postgresql://me:hunter2@host/db"})
    second = ppo_run(tmp_path / "b", config={"uri": "postgresql://me:hunter3@other/db"})
    (second / "environment.json").write_text(json.dumps({"python": "3.13.1", "torch": "2.13.0", "threads": 2}))
    found = compared(named(first, second), key="k")
    assert rows(found.environment) == {"python": ("3.11.2", "3.13.1")}
    assert rows(found.settings) == {"uri": ("postgresql://***@host/db", "postgresql://***@other/db")}


def test_paths_in_a_pipeline_are_the_same_wherever_it_lies(tmp_path: Path) -> None:
    def settings(pipeline: str, base: str) -> dict[str, Any]:
        return {"run": {"folder": f"{pipeline}/ppo"}, "model": {"path": f"{pipeline}/sft"}, "value": {"path": base}}

    first = ppo_run(tmp_path / "a", config=settings("runs/a", "runs/abc"))
    second = ppo_run(tmp_path / "b", config=settings("other/b", "runs/abd"))
    assert rows(compared(named(first, second, stages=True), key="k").settings) == {
        "value.path": ("runs/abc", "runs/abd")
    }
    assert set(rows(compared(named(first, second), key="k").settings)) == {"model.path", "value.path"}


def test_a_metric_has_one_plot_with_a_line_of_each_run_in_its_own_colour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()

    def without_gold(line: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in line.items() if "gold" not in name}

    runs = named(
        ppo_run(tmp_path / "a"), ppo_run(tmp_path / "b", change=without_gold), ppo_run(tmp_path / "c", num_steps=9)
    )
    cards = {card.title: card for card in compared(runs, key="k").cards[Section.MAIN]}
    assert cards["Score: training"].plot.legend == ((1, "a"), (2, "b"), (3, "c"))
    assert cards["Gold score: held out"].plot.legend == ((1, "a"), (3, "c"))
    readout = json.loads(cards["Score: training"].plot.readout)
    third = readout["series"][2]
    series = runs[2].run.series("score/mean")
    assert (third["label"], third["colour"], tuple(third["x"])) == ("c", 3, series.steps)
    assert third["y"] == pytest.approx(series.values, rel=1e-5)
    assert {"Clip fraction: policy", "Clip fraction: value"} <= set(cards)


def test_figures_stand_beside_each_other_where_they_are_of_the_same_metric(tmp_path: Path) -> None:
    def untested(line: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in line.items() if not name.startswith("evaluation/")}

    found = compared(named(ppo_run(tmp_path / "a"), ppo_run(tmp_path / "b", change=untested)), key="k")
    figures = rows(found.figures)
    (held_out, none), (no_training, training) = figures["Score"], figures["Score, training"]
    assert (held_out.shown_before, held_out.change, held_out.verdict) == ("-0.40", "+2.21", "better")
    assert training is not None
    assert (none, no_training) == (None, None)


def test_alarms_say_whose_they_are(tmp_path: Path) -> None:
    flat = {"score/mean": 1.0, "score/std": 0.0, "group/zero_variance_fraction": 1.0}
    runs = named(ppo_run(tmp_path / "well"), ppo_run(tmp_path / "ill", change=lambda line: line | flat))
    text = Page(comparison_page([runs])).text
    part = text[text.index("Alarms") : text.index("Curves")]
    well, _, ill = part.partition(" ill ")
    assert "No alarms." in well
    assert "Every score is the same number." in ill


def test_answers_to_the_same_prompt_stand_side_by_side_and_others_are_left_out(tmp_path: Path) -> None:
    for name, prompts in {"a": (0, 1, 2), "b": (2, 0, 7), "c": (0,)}.items():
        ppo_run(tmp_path / name, num_steps=3)
        answers = [sample(0, index, response="old") for index in prompts]
        answers += [sample(3, index, prompt_id=f"{name}{index}", response=f"{name} {index}") for index in prompts]
        answers += [sample(3, 0, prompt_id=f"{name}0", response="a second answer")]
        write_lines(tmp_path / name / "samples.jsonl", answers)
        for line in answers[:3]:
            line["prompt_id"] = f"{name}{line['prompt_id'][1:]}"
        write_lines(tmp_path / name / "samples.jsonl", answers)
    found = compared(named(*(tmp_path / name for name in "abc")), key="k").samples
    assert [(each.name, [answer and answer.response for answer in each.cells]) for each in found] == [
        ("Write about item 0:", ["a 0", "b 0", "c 0"]),
        ("Write about item 2:", ["a 2", "b 2", None]),
    ]


def test_runs_of_different_trainers_are_compared_in_what_they_share(tmp_path: Path) -> None:
    ppo = ppo_run(tmp_path / "ppo", config={"run": {"seed": 1}, "ppo": {"num_steps": 5}})
    sft = write_sft_run(tmp_path / "sft", num_steps=20)
    (sft / "config.resolved.json").write_text(json.dumps({"run": {"seed": 2}, "sft": {"num_epochs": 1}}))
    found = compared(named(ppo, sft), key="k")
    assert rows(found.settings) == {"run.seed": ("1", "2")}
    assert found.figures == ()
    assert [card.title for cards in found.cards.values() for card in cards] == ["Throughput: training"]
    assert "Runs of different trainers" in Page(comparison_page([named(ppo, sft)])).text
    # Both rank held-out pairs.
    shared = compared(named(write_dpo_run(tmp_path / "dpo"), write_reward_run(tmp_path / "reward")), key="k")
    assert any("accuracy" in card.title for card in shared.cards[Section.MAIN])


def test_whatever_comes_from_data_is_escaped_and_the_page_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    folders = [write_ppo_run(tmp_path / name, num_steps=3, hostile=True) for name in ("<i>a", "b & c")]
    (folders[1] / "config.resolved.json").write_text(json.dumps({"note": "other " + HOSTILE}))
    (folders[1] / "outcome.json").write_text(json.dumps({"state": "failed", "total_steps": 3, "reason": HOSTILE}))
    text = comparison_page([named(*folders)])
    page = Page(text)
    assert len(page.ids) == len(set(page.ids))
    assert page.tags.count("script") == text.count("<script") == 1
    assert "i" not in page.tags[: page.tags.index("main")]
    assert f"b & c failed. {HOSTILE}" in page.text
    assert f"other {HOSTILE}" in page.text
    assert "http" not in text.replace("http-equiv", "", 1).replace("http://www.w3.org/2000/svg", "", 1)
    assert not re.search(r"url\((?!#)|@import", text)
    assert comparison_page([named(*folders)]) == text
