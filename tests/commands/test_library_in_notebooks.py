"""What a notebook shows of trainings, runs, responses, evaluations, reports and progress."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import IPython.display
import pytest

from builders import tiny_language_model, tiny_tokenizer
from proximo import PPOConfig, PPOTrainer, SavedRun, Training
from proximo.commands.library.saved_run import ReportPage
from proximo.rollout.responses import Responses
from tiny_runs import make_inputs, recipe_of, share_of_vowels

HOSTILE = "<script>alert(1)</script>\x1b[2J\ud800 [bold]"
ESCAPED = "&lt;script&gt;alert(1)&lt;/script&gt;\ufffd[2J\ufffd [bold]"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Training:
    place = make_inputs(tmp_path_factory.mktemp("shown"))
    training = Training(recipe_of("ppo", place), {"run.folder": str(place / "run")})
    training.fit(quiet=True)
    return training


def html_of(value: Any) -> str:
    """What Jupyter shows of a value, as HTML."""
    shown = value._repr_mimebundle_(include=(), exclude=())
    assert shown["text/plain"]
    shown["text/html"].encode()
    return shown["text/html"]


def test_a_training_a_run_and_a_plan_are_shown_as_text(trained):
    assert repr(trained) == f"Training(ppo, run.folder={trained.recipe.run.folder!r})"
    assert repr(trained.run) == f"SavedRun({str(trained.run.folder)!r}, step 5 of 5, finished)"
    plans = Training("tiny", quiet=True).plan()
    assert isinstance(plans, list)
    for plan in plans:
        assert f"{plan.stage} on cpu, float32" in repr(plans)
        assert f"peak {plan.peak / 2**20:,.0f} MiB in {plan.largest.name}" in repr(plans)


def test_responses_are_a_list_that_shows_as_a_table(trained):
    responses = trained.run.generate(["a b", "c"], num_samples=2, max_new_tokens=4)
    assert isinstance(responses, list)
    assert len(responses) == 4
    responses[0] = dataclasses.replace(responses[0], text=HOSTILE)
    html = html_of(responses)
    for text in ("prompt", "response", "tokens", "ended by"):
        assert text in html
    assert ESCAPED in html
    assert "<script>" not in html
    assert html_of(Responses([]))
    assert "5 more" in html_of(Responses(list(responses[:1]) * 25))


def test_an_evaluation_shows_metrics_and_samples(trained):
    evaluation = trained.run.evaluate(num_prompts=2)
    html = html_of(evaluation)
    assert "evaluation/score" in html
    assert "response" in html
    assert "response" in html_of(evaluation.samples)


def test_a_report_is_a_path_that_shows_the_page(trained):
    page = trained.run.report()
    assert isinstance(page, Path)
    assert page.is_file()
    assert Path(os.fspath(page)).read_text().strip().startswith("<!DOCTYPE html>")
    html = page._repr_html_()
    assert html is not None
    assert "<iframe" in html
    assert "&lt;!DOCTYPE html&gt;" in html
    assert ReportPage(page.parent)._repr_html_() is None
    assert page.parent == SavedRun(page.parent).folder


class Cell:
    """The outputs of a cell, by what IPython is asked to show."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def display(self, shown: Any, *, display_id: bool = False) -> "Cell":
        if display_id:  # not a line that rich prints
            self.update(shown)
        return self

    def update(self, shown: Any) -> None:
        self.shown.append(html_of(shown))


def test_ppo_as_a_library_shows_its_progress_in_a_notebook_only(monkeypatch):
    cell = Cell()
    monkeypatch.setattr(IPython.display, "display", cell.display)
    config = PPOConfig(num_steps=4, prompts_per_step=2, rollout={"max_new_tokens": 3})
    trainer = PPOTrainer(tiny_language_model(num_hidden_layers=1), tiny_tokenizer(), config=config)
    assert repr(trainer) == "PPOTrainer(step 0 of 4, policy, reference, value)"

    def train_one_step(*, in_notebook: bool, quiet: bool = False) -> None:
        monkeypatch.setattr("rich.console._is_jupyter", lambda: in_notebook)
        with pytest.raises(_OneIsEnough):
            trainer.train(["a", "b c"], reward=share_of_vowels, on_step=stop, quiet=quiet)

    train_one_step(in_notebook=False)
    train_one_step(in_notebook=True, quiet=True)
    assert not cell.shown
    train_one_step(in_notebook=True)
    assert "step 2/4" in cell.shown[0]
    assert "step 3/4" in cell.shown[-1]
    assert "score" in cell.shown[-1]
    assert repr(trainer).startswith("PPOTrainer(step 3 of 4")


class _OneIsEnough(Exception):
    pass


def stop(step: int, metrics: object) -> None:
    raise _OneIsEnough
