"""What is taken for a folder of this machine, and what for a name on the Hub."""

from pathlib import Path

import pytest

from proximo.hub import is_hub_name, is_local, nearest_path, not_there

LOCAL = {
    "models/sft": "there",
    "models/stf": "in a folder that is there",
    "modles/sft": "nearly a folder that is there",
    "./a": "spelt as a path",
    "../a": "spelt as a path",
    "~/a": "spelt as a path",
    "/a/b": "spelt as a path",
    "a/b/c": "too deep for the Hub",
    "own er/x": "no name of the Hub",
    "a--b": "no name of the Hub",
    "owner/x.git": "no name of the Hub",
    "-a": "no name of the Hub",
    "own\\x": "no name of the Hub",
    "owner/" + "x" * 100: "too long for the Hub",
    "runs/": "no name of the Hub",
}


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "models" / "sft").mkdir(parents=True)
    (tmp_path / "cache" / "models--models--known").mkdir(parents=True)


@pytest.mark.parametrize("name", LOCAL)
def test_what_must_lie_here_is_not_looked_up_on_the_hub(name):
    assert is_local(name), LOCAL[name]


@pytest.mark.parametrize("name", ["gpt2", "owner/model", "Qwen/Qwen2.5-0.5B", "models/known", "EleutherAI/pythia-1b_x"])
def test_what_the_hub_may_have_is_not_taken_for_a_folder(name):
    assert not is_local(name)
    assert is_hub_name(name)


def test_the_nearest_that_is_there_is_named():
    assert nearest_path("modles/stf") == "models/sft"
    assert nearest_path("./models/sftt") == "models/sft"
    assert nearest_path("other/sft") is None
    assert "did you mean models/sft?" in not_there("models/stf")
    assert not_there("other/x", "file").startswith("there is no file other/x (seen from ")


def test_a_name_of_the_hub_beside_a_folder_of_its_owner_has_a_way(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    Path("Qwen").mkdir()
    assert is_local("Qwen/Qwen3-0.6B")
    assert "`hf download Qwen/Qwen3-0.6B`" in not_there("Qwen/Qwen3-0.6B")
    Path("cache", "models--Qwen--Qwen3-0.6B").mkdir(parents=True)
    assert not is_local("Qwen/Qwen3-0.6B")
