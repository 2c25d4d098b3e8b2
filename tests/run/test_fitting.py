"""The micro-batch that fits a GPU: chosen by the plan, only where the recipe leaves it out, and kept on resume."""

from pathlib import Path
from typing import Any

import pytest

from proximo.checkpoint.run_folder import CHECKPOINTS
from proximo.checkpoint.store import CheckpointStore
from proximo.commands.pipeline.run import run_recipe
from proximo.config.recipe import TrainerRecipe
from proximo.errors import RunFolderError
from proximo.plan import fitting
from proximo.plan.fitting import CHOICES, SHARE, fitting_tokens, is_left_out
from proximo.plan.profiling import make_plans
from proximo.run.options import RunOptions
from tiny_runs import changed, recipe_kind, recipe_of

EARLY = {"learning_rate": 1e-3, "in_backward": True, "max_gradient_norm": None, "non_finite_gradient": "stop"}


def recipe(kind: Any, inputs: Path, tokens: int | None = None, **changes: Any) -> TrainerRecipe:
    """The tiny recipe, with other tokens in a micro-batch, or none."""
    given = changed(recipe_of(kind, inputs), {name.replace("__", "."): value for name, value in changes.items()})
    given[kind].pop("tokens_per_microbatch", None)
    if tokens is not None:
        given[kind]["tokens_per_microbatch"] = tokens
    made = recipe_kind(kind).schema.model_validate(given)
    assert isinstance(made, TrainerRecipe)
    return made


SAMPLED_AHEAD = {"ppo__rollout": {"max_new_tokens": 4, "max_num_seqs": 4, "staleness": 1}}


@pytest.mark.parametrize("kind", ["ppo that samples ahead", "dpo"])
def test_the_most_tokens_whose_plan_fits(kind: str, inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choices = (128, 256)
    monkeypatch.setattr(fitting, "CHOICES", choices)
    name, _, ahead = kind.partition(" ")
    rows: dict[str, Any] = {"dpo__pairs_per_step": 8}
    if name == "ppo":
        rows = {"ppo__prompts_per_step": 32, "ppo__minibatch_responses": 32, "ppo__kl": {}}
    if ahead:
        rows |= SAMPLED_AHEAD
    left_out = recipe(name, inputs, **rows)

    def whole_peak(tokens: int) -> int:
        """Of all phases that train."""
        (plan,) = make_plans(recipe(name, inputs, tokens, **rows), device="cuda")
        return max(phase.peak for phase in plan.phases if phase.name.startswith("train"))

    peaks = [whole_peak(tokens) for tokens in choices]
    assert fitting_tokens(left_out, memory=round(peaks[0] / SHARE) - 2) == (128, False)
    for tokens, peak in zip(choices, peaks, strict=True):
        assert fitting_tokens(left_out, memory=round(peak / SHARE) + 2) == (tokens, True)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"tokens": 4096}, False),
        ({"engine": {"kind": "vllm"}}, False),
        ({"ppo__policy_optimizer": EARLY, "ppo__guards": {}}, False),
    ],
    ids=["left out", "given", "beside vLLM", "one micro-batch"],
)
def test_the_device_decides_where_the_recipe_does_not(changes: dict[str, Any], expected: bool, inputs: Path) -> None:
    assert is_left_out(recipe("ppo", inputs, **changes)) is expected


def test_a_trainer_without_such_a_setting_is_left_alone(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "KEY", "unknown")
    assert not is_left_out(recipe("sft", inputs))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A CPU that passes for a GPU of some bytes."""

    def of(memory: int) -> None:
        monkeypatch.setattr("proximo.commands.pipeline.run.device_kind", lambda _: "cuda")
        monkeypatch.setattr(fitting, "memory_bytes", lambda _: memory)

    return of


def test_a_model_without_a_plan_has_the_default(
    inputs: Path, tmp_path: Path, device: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise KeyError("odd")

    device(2**40)
    monkeypatch.setattr(fitting, "make_plans", fail)
    assert run_recipe(recipe("sft", inputs, run__folder=str(tmp_path / "run")), RunOptions()) == 0
    assert (
        "sft.tokens_per_microbatch is 8,192, the default: there is no plan of it: KeyError" in capsys.readouterr().err
    )


def test_a_run_takes_what_fits_and_keeps_it_when_it_is_resumed(
    inputs: Path, tmp_path: Path, device: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    made = recipe("sft", inputs, run__folder=str(tmp_path / "run"))
    device(2**40)
    assert run_recipe(made, RunOptions()) == 0
    assert "sft: sft.tokens_per_microbatch is 32,768, which fits the memory of the device" in capsys.readouterr().err
    device(1)  # a smaller one: another choice would be another run, which is refused
    assert run_recipe(made, RunOptions(resume="auto")) == 0
    saved = CheckpointStore(tmp_path / "run" / CHECKPOINTS).latest()
    assert saved is not None
    assert saved.state["fingerprints"]["config"]["sft"]["tokens_per_microbatch"] == CHOICES[-1]
    other = recipe("sft", inputs, 8192, run__folder=str(tmp_path / "run"))
    with pytest.raises(RunFolderError, match=r"tokens_per_microbatch: 32768 -> 8192\n.*--allow-different-environment"):
        run_recipe(other, RunOptions(resume="auto"))
    assert run_recipe(other, RunOptions(resume="auto", allow_different_environment=True)) == 0


def test_another_trainers_folder_is_refused_as_such(inputs: Path, tmp_path: Path, device: Any) -> None:
    folder = str(tmp_path / "run")
    device(2**40)
    assert run_recipe(recipe("sft", inputs, run__folder=folder), RunOptions(quiet=True)) == 0
    with pytest.raises(RunFolderError, match="sft is not a known key"):
        run_recipe(recipe("dpo", inputs, run__folder=folder), RunOptions(resume="must", quiet=True))
