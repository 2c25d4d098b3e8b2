"""A resumed run finds the tokenizer and the models that no checkpoint holds as they were, or says which is another."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from builders import tiny_language_model, tiny_tokenizer
from proximo.cli import main
from proximo.errors import RunFolderError
from proximo.models.language import LanguageModel
from proximo.models.pretrained.saving import save_pretrained
from proximo.models.scalar import HeadStart, scalar_from_language_model
from proximo.run.options import RunOptions
from tiny_runs import LORA, changed, make_inputs, recipe_of, run


def other_scorer(place: Path) -> None:
    model = LanguageModel(tiny_language_model(seed=9, num_hidden_layers=1))
    save_pretrained(scalar_from_language_model(model, HeadStart.NORMAL, seed=9).model, place / "reward_model")


def other_base(place: Path) -> None:
    save_pretrained(tiny_language_model(seed=9, num_hidden_layers=1), place / "language_model")


def other_template(place: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(place / "tokenizer")


OWN_START = {"value": {"init_from": "policy"}}
ADAPTED = {"model.lora": LORA, "value": {"init_from": "policy"}}


@pytest.mark.parametrize(
    ("kind", "recipe", "change", "named"),
    [
        ("ppo", {}, other_scorer, "models.reward_model"),
        ("ppo", OWN_START, other_base, "models.reference"),
        ("ppo", ADAPTED, other_base, "models.policy_base"),
        ("sft", {"model.lora": LORA}, other_base, "models.base"),
        ("sft", {}, other_template, "tokenizer"),
    ],
)
def test_a_model_that_changed_behind_its_path_is_named(kind, recipe, change, named: str, tmp_path: Path) -> None:
    place = make_inputs(tmp_path)
    start = {"model": {"path": str(place / "language_model")}} if recipe is OWN_START else {}
    length = {"ppo.num_steps": 2} if kind == "ppo" else {f"{kind}.num_epochs": 1}
    made = changed(recipe_of(kind, place), {**start, **recipe, **length})
    assert run(kind, made, RunOptions(quiet=True)) == 0
    change(place)
    with pytest.raises(RunFolderError, match=rf"(?s)inputs \(saved -> now\):\s+{named}: "):
        run(kind, made, RunOptions(quiet=True, resume="auto"))


def test_another_start_of_what_the_checkpoint_holds_does_not_matter(tmp_path: Path) -> None:
    place = make_inputs(tmp_path)
    made = changed(recipe_of("sft", place), {"model": {"path": str(place / "language_model")}})
    assert run("sft", made, RunOptions(quiet=True)) == 0
    other_base(place)
    assert run("sft", made, RunOptions(quiet=True, resume="auto")) == 0


def test_changed_data_are_named_by_their_file(tmp_path: Path) -> None:
    place = make_inputs(tmp_path)
    made = changed(recipe_of("sft", place), {"sft.num_epochs": 1})
    assert run("sft", made, RunOptions(quiet=True)) == 0
    texts = place / "texts.jsonl"
    texts.write_text(texts.read_text() + texts.read_text().splitlines()[0] + "\n")
    line = rf'data\.{texts}: "12 rows, sha256 \w{{16}}" -> "13 rows, sha256 \w{{16}}"\n'
    with pytest.raises(RunFolderError, match=rf"inputs \(saved -> now\):\n  {line}  bring the same data"):
        run("sft", made, RunOptions(quiet=True, resume="auto"))


def test_one_bit_of_a_frozen_model_is_seen_by_a_resume_and_an_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = make_inputs(tmp_path)
    made = changed(recipe_of("ppo", place), {"ppo.num_steps": 2})
    assert run("ppo", made, RunOptions(quiet=True)) == 0
    assert main(["evaluate", str(place / "run"), "--num-prompts", "1"]) == 0
    assert "other than in the run" not in capsys.readouterr().err
    weights = place / "reward_model" / "model.safetensors"
    tensors = load_file(weights)
    max(tensors.values(), key=torch.numel).flatten().view(torch.int32)[5] ^= 1
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(RunFolderError, match=r"models\.reward_model: "):
        run("ppo", made, RunOptions(quiet=True, resume="auto"))
    assert main(["evaluate", str(place / "run"), "--num-prompts", "1"]) == 0
    assert capsys.readouterr().err.count("warning: other than in the run: models.reward_model: ") == 1
