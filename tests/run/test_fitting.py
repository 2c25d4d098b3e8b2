"""The micro-batch that fits a GPU: chosen by the plan, only where the recipe leaves it out, and kept on resume."""

from pathlib import Path
from typing import Any

import pytest

from proximo.checkpoint.run_folder import CHECKPOINTS
from proximo.checkpoint.store import CheckpointStore
from proximo.commands.pipeline.run import run_recipe
from proximo.config.recipe import TrainerRecipe
from proximo.errors import ModelError
from proximo.plan import fitting
from proximo.plan.fitting import CHOICES, SHARE, fitting_tokens, is_left_out
from proximo.plan.profiling import make_plans
from proximo.run.options import RunOptions
from tiny_runs import changed, make_inputs, recipe_kind, recipe_of

EARLY = {"learning_rate": 1e-3, "in_backward": True, "max_gradient_norm": None, "non_finite_gradient": "stop"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def recipe(kind: Any, place: Path, tokens: int | None = None, **changes: Any) -> TrainerRecipe:
    """The tiny recipe, with other tokens in a micro-batch, or none."""
    given = changed(recipe_of(kind, place), {name.replace("__", "."): value for name, value in changes.items()})
    given[kind].pop("tokens_per_microbatch", None)
    if tokens is not None:
        given[kind]["tokens_per_microbatch"] = tokens
    made = recipe_kind(kind).schema.model_validate(given)
    assert isinstance(made, TrainerRecipe)
    return made


@pytest.mark.parametrize("kind", ["ppo", "dpo"])
def test_the_plan_with_the_choice_fits_and_that_with_twice_as_many_does_not(
    kind: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = (512, 256, 128)
    monkeypatch.setattr(fitting, "CHOICES", choices)
    ppo = {"ppo__prompts_per_step": 64, "ppo__minibatch_responses": 64, "ppo__kl": {}}
    rows = ppo if kind == "ppo" else {"dpo__pairs_per_step": 32}
    peaks = [
        make_plans(recipe(kind, place, tokens, **rows), device="cuda", updates_only=True)[0].peak for tokens in choices
    ]
    left_out = recipe(kind, place, **rows)
    for tokens, peak, larger in zip(choices[1:], peaks[1:], peaks, strict=False):
        assert fitting_tokens(left_out, memory=round((peak + larger) / 2 / SHARE)) == tokens
    assert fitting_tokens(left_out, memory=2**40) == choices[0]
    assert fitting_tokens(left_out, memory=1) == choices[-1]


def test_an_update_smaller_than_a_micro_batch_needs_no_more_memory_for_a_larger_one(place: Path) -> None:
    few = make_plans(recipe("sft", place, 2048), device="cuda", updates_only=True)[0]
    assert fitting_tokens(recipe("sft", place), memory=round(1.01 * few.peak / SHARE)) == CHOICES[0]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"tokens": 8192}, False),
        ({"engine": {"kind": "vllm"}}, False),
        ({"ppo__policy_optimizer": EARLY, "ppo__guards": {}}, False),
    ],
    ids=["left out", "given", "beside vLLM", "one micro-batch"],
)
def test_the_device_decides_where_the_recipe_does_not(changes: dict[str, Any], expected: bool, place: Path) -> None:
    assert is_left_out(recipe("ppo", place, **changes)) is expected


def test_a_model_without_a_plan_has_the_default(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ModelError("no plan")

    monkeypatch.setattr(fitting, "make_plans", refuse)
    assert fitting_tokens(recipe("sft", place), memory=2**40) is None


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A CPU that passes for a GPU of some bytes."""

    def of(memory: int) -> None:
        monkeypatch.setattr("proximo.commands.pipeline.run.device_kind", lambda _: "cuda")
        monkeypatch.setattr(fitting, "memory_bytes", lambda _: memory)

    return of


def test_a_run_takes_what_fits_and_keeps_it_when_it_is_resumed(
    place: Path, tmp_path: Path, device: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    made = recipe("sft", place, run__folder=str(tmp_path / "run"))
    device(2**40)
    assert run_recipe(made, RunOptions()) == 0
    assert "sft: sft.tokens_per_microbatch is 32,768, by the memory of the device" in capsys.readouterr().err
    device(1)  # a smaller one: another choice would be another run, which is refused
    assert run_recipe(made, RunOptions(resume="auto")) == 0
    saved = CheckpointStore(tmp_path / "run" / CHECKPOINTS).latest()
    assert saved is not None
    assert saved.state["fingerprints"]["config"]["sft"]["tokens_per_microbatch"] == CHOICES[0]
    assert made.model_dump()["sft"]["tokens_per_microbatch"] not in CHOICES[:2]
