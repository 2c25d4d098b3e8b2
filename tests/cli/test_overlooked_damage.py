"""Damage that libraries pass over without a word: named by its file, or done without where nothing hangs on it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from faults import recipe_file, refused

from proximo.cli import main
from proximo.run.options import RunOptions
from tiny_runs import changed, make_inputs, recipe_of, run

START = RunOptions(quiet=True)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs, the run of an adapter in `lora`, and that of a whole model in `run`."""
    inputs = make_inputs(tmp_path_factory.mktemp("damage"))
    assert run("sft", recipe_of("sft", inputs), START) == 0
    adapter = {"run.folder": str(inputs / "lora"), "model.lora": {"rank": 2}}
    assert run("sft", changed(recipe_of("sft", inputs), adapter), START) == 0
    return inputs


def as_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


OVERLOOKED: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "what ends an answer, cut": (
        "generation_config.json",
        lambda file: file.write_bytes(b'{"eos_'),
        "is not complete JSON",
    ),
    "what ends an answer, misspelt": (
        "generation_config.json",
        lambda file: file.write_text('{"eos_token_if": [2, 5]}'),
        "has the key 'eos_token_if' where 'eos_token_id' is meant",
    ),
    "the shape, misspelt": (
        "config.json",
        lambda file: file.write_text(file.read_text().replace('"rms_norm_eps"', '"rms_norm_epq"')),
        "has the key 'rms_norm_epq' where 'rms_norm_eps' is meant",
    ),
    "the special tokens, a folder": ("tokenizer_config.json", as_folder, "is a folder"),
    "the template, a folder": ("chat_template.jinja", as_folder, "is a folder"),
}


@pytest.mark.parametrize("fault", OVERLOOKED)
def test_a_damaged_file_that_libraries_pass_over_is_refused_by_every_reader(
    fault: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a word they would take their defaults, and the numbers would be others."""
    model = shutil.copytree(place / "language_model", tmp_path / "model")
    name, damage, told = OVERLOOKED[fault]
    damage(model / name)
    changes = {"model": {"path": str(model)}, "tokenizer.path": str(model), "run.folder": str(tmp_path / "run")}
    recipe = recipe_file(changed(recipe_of("ppo", place), changes), tmp_path / "ppo.yaml")
    for arguments in (["generate", str(model), "ab"], ["plan", recipe], ["ppo", recipe]):
        assert f"{model / name} {told}" in refused(capsys, arguments)
    assert not (tmp_path / "run").exists()


def test_an_adapter_whose_setting_is_misspelt_is_refused_and_not_scaled_otherwise(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(place / "lora/checkpoints/step-000005/policy", tmp_path / "adapter")
    file = model / "adapter_config.json"
    file.write_text(file.read_text().replace('"lora_alpha"', '"lora_alphi"'))
    said = refused(capsys, ["generate", str(model), "ab"])
    assert f"{file} has the key 'lora_alphi' where 'lora_alpha' is meant" in said


def test_an_adapter_with_a_tensor_of_another_name_is_refused_and_not_half_loaded(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after a flipped bit in the header of its weights."""
    model = shutil.copytree(place / "lora/checkpoints/step-000005/policy", tmp_path / "adapter")
    file = model / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes().replace(b"q_proj.lora_B", b"q_proj.lora_R"))
    said = refused(capsys, ["generate", str(model), "ab"])
    assert f"{file} lacks 1 of the adapter's tensors, such as " in said
    assert "q_proj.lora_B" in said


def test_what_a_folder_of_a_model_lacks_is_said(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(place / "language_model", tmp_path / "model")
    (model / "tokenizer.json").unlink()
    assert f"the tokenizer of {model} cannot be read: there is no tokenizer.json" in refused(
        capsys, ["generate", str(model), "ab"]
    )
    (model / "config.json").unlink()
    assert f"{model} holds no run and no model: there is no file config.json" in refused(
        capsys, ["generate", str(model), "ab"]
    )


@pytest.mark.parametrize("name", ["config.resolved.json", "metrics.jsonl", "samples.jsonl", "environment.json"])
def test_a_record_that_is_a_folder_hinders_no_export(name: str, place: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(place / "run", tmp_path / "run")
    as_folder(folder / name)
    assert main(["export", str(folder), str(tmp_path / "out")]) == 0
    assert main(["report", str(folder)]) == (2 if name == "metrics.jsonl" else 0)
