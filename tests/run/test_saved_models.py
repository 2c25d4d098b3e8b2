"""Models that lie in a run's checkpoint are compared with its hashes, wherever a recipe or a command names them."""

from pathlib import Path

import pytest

from proximo.commands.pipeline.run import whole_result
from proximo.errors import CheckpointError, RunFolderError
from proximo.run import journal
from proximo.run.checkpoint_lookup import find_checkpoint, find_model, language_model_path, saved_recipe, verify_model
from proximo.run.options import RunOptions
from proximo.trainer_kinds import recipe_kind
from tiny_runs import LORA, changed, make_inputs, recipe_of, run


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(journal, "write_report", lambda folder: folder / "report.html")
    return make_inputs(tmp_path)


def train(kind, place: Path, folder: str, changes: dict) -> Path:
    """The folder of the newest checkpoint."""
    steps = {"ppo.num_steps": 2} if kind == "ppo" else {f"{kind}.num_epochs": 1}
    one = {"run.folder": str(place / folder), "run.save_every_steps": None, "run.evaluate_every_steps": None}
    made = changed(recipe_of(kind, place), {**one, **steps, **changes})
    assert run(kind, made, RunOptions(quiet=True)) == 0
    return find_checkpoint(place / folder).folder


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("key", ["model", "reference", "value", "reward.0", "tokenizer"])
def test_a_recipe_that_names_a_model_of_a_damaged_checkpoint_is_refused(key: str, place: Path) -> None:
    kind, role = ("reward", "reward") if key in ("value", "reward.0") else ("sft", "policy")
    checkpoint = train(kind, place, "before", {})
    flip(checkpoint / role / ("tokenizer.json" if key == "tokenizer" else "model.safetensors"))
    given = {f"{key}.path": str(checkpoint / role)}
    start = {"value": {"path": str(checkpoint / role)}} if key == "value" else {}
    recipe = changed(recipe_of("ppo", place), start or given)
    recipe["model"].pop("config" if key == "model" else "none", None)
    with pytest.raises(CheckpointError, match=rf"{checkpoint / role}/\S+ has other contents"):
        run("ppo", recipe, RunOptions(quiet=True))
    assert not (place / "run").exists()


def test_a_pipeline_hands_no_damaged_adapter_on(place: Path) -> None:
    checkpoint = train("sft", place, "sft", {"model.lora": LORA})
    flip(checkpoint / "policy" / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors has other contents"):
        whole_result(place, "@sft")
    assert not (place / "sft" / "merged").exists()


def test_a_link_to_a_model_of_a_checkpoint_is_followed(place: Path) -> None:
    checkpoint = train("sft", place, "sft", {})
    link = place / "mine"
    link.symlink_to(checkpoint / "policy")
    verify_model(str(link))
    flip(checkpoint / "policy" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors has other contents"):
        verify_model(str(link))


def test_a_value_head_is_read_with_the_layers_below_it(place: Path) -> None:
    checkpoint = train("ppo", place, "run", {"value": {"init_from": "trunk"}, "ppo.critic_warmup_steps": 1})
    assert find_model(place / "run", role="value").folder == checkpoint / "value"
    flip(checkpoint / "policy" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"policy/model\.safetensors has other contents"):
        find_model(place / "run", role="value")


def test_what_is_not_in_a_checkpoint_is_taken_as_it_is(place: Path) -> None:
    for path in (place / "language_model", place / "nothing", "owner/name"):
        verify_model(str(path))
    assert language_model_path("owner/name") == "owner/name"
    train("sft", place, "run", {})
    with pytest.raises(RunFolderError, match="has no value model; it has policy"):
        find_model(place / "run", role="value")


def test_a_path_of_a_moved_run_changes_where_only_the_new_one_is_there(tmp_path: Path) -> None:
    """A name that is no path, such as that of an argument, stays as it is."""
    old, new = tmp_path / "old", tmp_path / "new"
    named = [str(old / name) for name in ("kept", "moved", "gone")]
    for path in (old / "kept", new / "kept", new / "moved"):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    sources = [{"function": "mine:rows", "kwargs": {each: each}} for each in named]
    made = changed(recipe_of("sft", tmp_path), {"run.folder": str(old / "sft"), "data.sources": sources})
    (new / "sft").mkdir()
    resolved = recipe_kind("sft").schema.model_validate(made).model_dump_json()
    (new / "sft" / "config.resolved.json").write_text(resolved)
    found = saved_recipe(new / "sft").model_dump()["data"]["sources"]
    assert [source["kwargs"] for source in found] == [
        {named[0]: named[0]},
        {named[1]: str(new / "moved")},
        {named[2]: named[2]},
    ]
