"""benchmarks/asynchronous.py in small: its model of the time, its reward, and runs by the simulated clock."""

import time

import asynchronous
import pytest
import torch
from asynchronous import ENGINES, Case
from transformers import LlamaForCausalLM


@pytest.mark.parametrize("bound", [0, 1, 4, 8])
@pytest.mark.parametrize("sampling", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("engine", ENGINES)
def test_with_equal_batches_a_step_takes_what_the_closed_form_says(engine: str, sampling: float, bound: int) -> None:
    case, num_steps, training = Case(slowness=sampling, engine=engine, bound=bound), 2000, 1.0
    predicted = asynchronous.predict([sampling] * num_steps, [training] * num_steps, case)
    expected = max(training, (sampling + training) / (bound + 1))
    if engine == ENGINES[0] or bound == 1:
        expected = max(expected, sampling)
    assert predicted / num_steps == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("prompt", "response", "score"),
    [("3", "2 1 0", 1.0), ("3", "2 0", 0.25), ("3", "2 1", 0.5), ("3", "2 1 0 0", 0.6), ("1", "", 0.0)],
)
def test_the_score_is_the_share_that_is_right(prompt: str, response: str, score: float) -> None:
    assert asynchronous.share_right([prompt], [response], []) == [score]


@pytest.mark.parametrize(("engine", "bound"), [(ENGINES[0], 0), (ENGINES[0], 2), (ENGINES[1], 1), (ENGINES[1], 2)])
def test_a_run_takes_the_predicted_time_and_learns_from_what_the_engine_returned(
    engine: str, bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(asynchronous.shape()).eval()
    monkeypatch.setattr(asynchronous, "first_model", lambda seed: model)
    monkeypatch.setattr("proximo.rollout.asynchronous.time", time)  # so that the simulated clock is put away again
    found = asynchronous.simulated(Case(slowness=3, engine=engine, bound=bound, weight="none"), 0, 6)
    assert found["equal"]
    assert found["time"] == pytest.approx(found["predicted"], rel=0.05)
    assert (found["time"] < found["one_by_one"] - 2) == (bound > 0)
    assert (found["mean_steps"] > 0) == (bound > 0)
