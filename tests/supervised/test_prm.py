"""Training of a process reward model: the loss and its figures by hand, any cut into micro-batches, adapters, ranks."""

import json
import math
from pathlib import Path

import pytest
import torch

from ppo.test_updates import worst_difference
from proximo.metrics.calibration import probability_error
from proximo.models.packing import pack
from proximo.run.options import RunOptions
from proximo.supervised.prm_trainer import JudgedSteps, evaluation_metrics, training_metrics
from supervised.tiny_tasks import first_update, prm_task, solutions
from tiny_runs import changed, make_inputs, recipe_of, run


def test_loss_and_gradient_are_those_of_one_step_at_a_time() -> None:
    """Each step is the end of a sequence of its own, and the mean is over the steps of all solutions."""
    task, plain = prm_task(torch.float64), prm_task(torch.float64)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for example in solutions():
        for end, label in zip(example.ends, example.labels, strict=True):
            score = plain.model.token_scores(pack([example.token_ids[: end + 1]]))[-1]
            total, count = total - torch.nn.functional.logsigmoid(score if label else -score), count + 1
    (total / count).backward()
    expected = {name: p.grad for name, p in plain.model.model.named_parameters() if p.grad is not None}
    record = task.evaluate()
    assert record.metrics["evaluation/loss"].value == pytest.approx((total / count).item(), rel=1e-12)
    assert worst_difference(first_update(task)[1], expected) < 1e-10


@pytest.mark.soak
def test_it_learns_its_solutions() -> None:
    task = prm_task()
    for step in range(1, 41):
        task.step(step)
    record = task.evaluate()
    assert record.metrics["evaluation/step_accuracy"].value == 1.0
    assert record.metrics["evaluation/error_found"].value == 1.0
    assert record.metrics["evaluation/right_accepted"].value == 1.0


def log_odds(*probabilities: float) -> tuple[float, ...]:
    return tuple(math.log(p / (1 - p)) for p in probabilities)


JUDGED = JudgedSteps(
    scores=(log_odds(0.9, 0.2, 0.6), log_odds(0.8, 0.4), log_odds(0.7), log_odds(0.3, 0.9)),
    labels=((1.0, 0.0, 1.0), (1.0, 1.0), (1.0,), (1.0, 0.0)),
)
"""The first error is found; a right solution is refused; one is accepted; an error is seen one step too early."""


def test_figures_of_judged_steps_by_hand() -> None:
    """Of eight steps five are judged right: 0.9, 0.2, 0.6 of the first, 0.8 of the second, 0.7 of the third."""
    found = {name: each.value for name, each in evaluation_metrics(JUDGED).items()}
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    # Bins: 0.2 | 0.3 | 0.4 | 0.6 | 0.7 | 0.8 | 0.9 and 0.9, with the labels 0 | 1 | 1 | 1 | 1 | 1 | 1 and 0.
    calibration = (0.2 + 0.7 + 0.6 + 0.4 + 0.3 + 0.2 + abs(1.8 - 1)) / 8
    assert found == pytest.approx(
        {
            "evaluation/solutions": 4,
            "evaluation/steps": 8,
            "evaluation/constant_loss": entropy,
            "evaluation/step_accuracy": 5 / 8,
            "evaluation/error_found": 1 / 2,
            "evaluation/right_accepted": 1 / 2,
            "evaluation/step_calibration_error": calibration,
        }
    )
    training = {name: each.value for name, each in training_metrics("prm", JUDGED).items()}
    assert training == pytest.approx(
        {"prm/step_accuracy": 5 / 8, "prm/label_mean": 6 / 8, "prm/probability_mean": 4.8 / 8}
    )


def test_without_a_solution_of_a_kind_its_figure_is_empty_and_not_0() -> None:
    right = JudgedSteps(scores=(log_odds(0.9),), labels=((1.0,),))
    found = evaluation_metrics(right)
    assert (found["evaluation/error_found"].value, found["evaluation/right_accepted"].value) == (None, 1.0)
    assert found["evaluation/constant_loss"].value == 0.0
    assert probability_error([], []) is None


def test_a_run_saves_its_separator_and_samples_with_every_step(tmp_path: Path) -> None:
    recipe = changed(recipe_of("prm", make_inputs(tmp_path)), {"data.step_separator": "; "})
    assert run("prm", recipe, RunOptions(quiet=True)) == 0
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000005" / "reward"
    assert json.loads((checkpoint / "config.json").read_text())["step_separator"] == "; "
    card = (checkpoint / "README.md").read_text()
    assert "training of a process reward model" in card
    assert "| `data.step_separator` | '; ' |" in card
    sample = json.loads((tmp_path / "run" / "samples.jsonl").read_text().splitlines()[-1])
    assert sample["response"].endswith("; ")
    assert len(sample["labels"]) == len(sample["probabilities"]) == 3
    assert sample["score"] == min(sample["probabilities"])
