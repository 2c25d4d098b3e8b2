"""What a notebook shows of trainings, runs, responses, evaluations and reports. Their HTML: tests/metrics."""

import dataclasses
import os
from pathlib import Path

import pytest

from builders import tiny_language_model, tiny_tokenizer
from proximo import PPOConfig, PPOTrainer, SavedRun, Training
from proximo.commands.library.report_page import ReportPage
from proximo.metrics.notebook.display import UpdatedCell
from proximo.rollout.responses import Responses
from tiny_runs import make_inputs, recipe_of, share_of_vowels

HOSTILE = "<script>alert(1)</script>"
ESCAPED = "&lt;script&gt;alert(1)&lt;/script&gt;"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Training, str]:
    """A training that has run, and what it showed before."""
    place = make_inputs(tmp_path_factory.mktemp("shown"))
    training = Training(recipe_of("ppo", place), {"run.folder": str(place / HOSTILE.replace("/", "|"))})
    before = training._repr_html_()
    training.fit(quiet=True)
    return training, before


def test_a_training_shows_its_recipe_and_how_far_its_run_is(trained):
    training, before = trained
    assert "not started" in before
    after = training._repr_html_()
    assert "step 5 of 5, finished" in after
    for text in ("Training: ppo", "prompts.jsonl", "5 steps", "&lt;script&gt;"):
        assert text in after
    assert "<script>" not in after


def test_a_pipeline_shows_each_stage():
    html = Training("tiny", quiet=True)._repr_html_()
    for text in ("SFT", "Reward model", "PPO", "1 epoch", "2 steps"):
        assert text in html


def test_plans_show_memory_and_work_of_each_stage():
    plans = Training("tiny", quiet=True).plan()
    assert isinstance(plans, list)
    html = plans._repr_html_()
    assert html == "".join(plan._repr_html_() for plan in plans)
    for plan in plans:
        for text in (
            f"Plan: {plan.stage} on cpu, float32",
            f"peak {plan.peak / 2**20:,.0f} MiB in {plan.largest.name}",
            *(role.architecture for role in plan.roles),
            *(phase.name for phase in plan.phases),
            *(part for phase in plan.phases for part in phase.parts),
        ):
            assert text in plan._repr_html_()
    noted = dataclasses.replace(plans[0], notes=(HOSTILE,))._repr_html_()
    assert ESCAPED in noted
    assert "<script>" not in noted


def test_a_run_shows_its_state_and_figures(trained):
    html = trained[0].run._repr_html_()
    for text in ("finished after step 5 of 5", "before", "after", "<svg"):
        assert text in html
    assert "<script>" not in html


def test_responses_are_a_list_that_shows_as_a_table(trained):
    responses = trained[0].run.generate(["a b", "c"], num_samples=2, max_new_tokens=4)
    assert isinstance(responses, list)
    assert len(responses) == 4
    responses[0] = dataclasses.replace(responses[0], text=HOSTILE)
    html = responses._repr_html_()
    assert html.count("<tr>") == 5
    assert ESCAPED in html
    assert "<script>" not in html
    assert Responses([])._repr_html_()


def test_an_evaluation_shows_metrics_and_samples(trained):
    evaluation = trained[0].run.evaluate(num_prompts=2)
    html = evaluation._repr_html_()
    assert "evaluation/score" in html
    assert f"{len(evaluation.samples):,} samples" in html
    assert "<table" in evaluation.samples._repr_html_()


def test_a_report_is_a_path_that_shows_the_page(trained):
    page = trained[0].run.report()
    assert isinstance(page, Path)
    assert page.is_file()
    assert Path(os.fspath(page)).read_text().strip().startswith("<!DOCTYPE html>")
    html = page._repr_html_()
    assert html is not None
    assert "<iframe" in html
    assert "&lt;!DOCTYPE html&gt;" in html
    assert ReportPage(page.parent)._repr_html_() is None
    assert page.parent == SavedRun(page.parent).folder


def test_ppo_as_a_library_shows_its_progress_and_itself_in_a_notebook_only(monkeypatch):
    shown: list[str] = []
    monkeypatch.setattr(UpdatedCell, "show", lambda self, html, text: shown.append(text))
    config = PPOConfig(num_steps=4, prompts_per_step=2, rollout={"max_new_tokens": 3})
    trainer = PPOTrainer(tiny_language_model(num_hidden_layers=1), tiny_tokenizer(), config=config)
    assert "0 of 4, 0 updates" in trainer._repr_html_()

    def train_one_step(*, in_notebook: bool, quiet: bool = False) -> None:
        monkeypatch.setattr("rich.console._is_jupyter", lambda: in_notebook)
        with pytest.raises(_OneIsEnough):
            trainer.train(["a", "b c"], reward=share_of_vowels, on_step=stop, quiet=quiet)

    train_one_step(in_notebook=False)
    train_one_step(in_notebook=True, quiet=True)
    assert not shown
    train_one_step(in_notebook=True)
    assert (shown[0], shown[-1]) == ("PPO: step 2/4", "PPO: step 3/4")
    html = trainer._repr_html_()
    for text in ("3 of 4", "policy", "reference", "value", "LlamaForCausalLM", "float32 on cpu"):
        assert text in html
    assert "<table" in trainer.generate(["a"])._repr_html_()


class _OneIsEnough(Exception):
    pass


def stop(step: int, metrics: object) -> None:
    raise _OneIsEnough
