"""The README.md of trained models: what it says, where it lies, what it never tells, and the way to the Hub."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from builders import tiny_language_model
from proximo.cli import main
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions
from proximo.models.pretrained.saving import save_pretrained
from proximo.run import journal
from proximo.run import pushes as hub
from proximo.run.model_card import CARD, write_final_cards
from proximo.run.options import RunOptions
from run_outcomes import read_lines
from tiny_runs import LLAMA, LORA, changed, make_inputs, recipe_of, run

QUIET = RunOptions(quiet=True)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(journal, "write_report", lambda folder: folder / "report.html")
    place = make_inputs(tmp_path / "private-folder-of-mine")
    monkeypatch.chdir(place)
    return place


@pytest.fixture(scope="module")
def fine_tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The inputs, and a run of fine-tuning on them."""
    place = make_inputs(tmp_path_factory.mktemp("cards"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "write_report", lambda folder: folder / "report.html")
        assert run("sft", recipe_of("sft", place), QUIET) == 0
    return place


@pytest.fixture
def sft(fine_tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of them, in which the test is."""
    place = shutil.copytree(fine_tuned, tmp_path / "sft")
    monkeypatch.chdir(place)
    return place


def trained(place: Path, kind: Any, changes: dict[str, Any] | None = None) -> Path:
    """The latest checkpoint of a run of five steps."""
    assert run(kind, changed(recipe_of(kind, place), changes or {}), QUIET) == 0
    return place / "run" / "checkpoints" / "step-000005"


def front_matter(card: str) -> dict[str, Any]:
    return yaml.safe_load(card.split("---\n")[1])


def rows(card: str, first: str) -> list[str]:
    (line,) = [line for line in card.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_every_model_of_the_final_checkpoint_has_a_card_and_no_earlier_one(place: Path) -> None:
    final = trained(place, "ppo")
    policy, value = ((final / role / CARD).read_text() for role in ("policy", "value"))
    assert front_matter(policy)["pipeline_tag"] == "text-generation"
    assert front_matter(value)["pipeline_tag"] == "text-classification"
    assert front_matter(policy)["tags"] == ["proximo", "ppo"]
    assert front_matter(policy)["library_name"] == "transformers"
    assert "from step 5 of PPO" in policy
    assert "- Reward: reward_model (`reward_model` (a folder of its author)), weight 1" in policy
    assert "(`tiny_runs:share_of_vowels`), weight 4" in policy
    assert not list((place / "run").glob("checkpoints/step-000004/*/README.md"))
    assert not [path for path in final.rglob(CARD) if path.parent.name not in ("policy", "value")]


def test_the_card_of_a_distilled_model_names_the_teacher(place: Path) -> None:
    changes = {
        "reference": {"config": LLAMA | {"hidden_size": 32}},
        "reward": [],
        "value": {},
        "ppo.kl": {"kind": "loss", "estimator": "full", "coefficient": 1.0},
        "ppo.advantage": "return_to_go",
    }
    card = (trained(place, "ppo", changes) / "policy" / CARD).read_text()
    assert "- Reference, which it was compared with: random weights (" in card


def test_the_settings_and_the_figures_are_those_of_the_run(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = (trained(place, "dpo", {"dpo.beta": 0.3}) / "policy" / CARD).read_text()
    assert rows(card, "`dpo.beta`")[1] == "0.3"
    assert rows(card, "`run.seed`")[1] == "5"
    lines = read_lines(place / "run" / "metrics.jsonl")
    shown = rows(card, "Margin")
    assert shown[1].endswith("(step 0)")
    assert shown[2] == f"{lines[-1]['evaluation/margin_mean']:.2f} (step 5)"
    assert main(["evaluate", "run"]) == 0
    (again,) = [line for line in capsys.readouterr().out.splitlines() if "evaluation/margin_mean" in line]
    assert shown[2].split()[0] in again


def test_a_card_of_an_earlier_checkpoint_knows_nothing_of_later_steps(sft: Path) -> None:
    assert main(["export", "run", "out", "--checkpoint", "step-4"]) == 0
    card = Path("out", CARD).read_text()
    assert "from step 4 of supervised fine-tuning" in card
    before = read_lines(sft / "run" / "metrics.jsonl")[4]
    assert rows(card, "Loss")[2] == f"{before['evaluation/loss']:.2f} (step 4)"


@pytest.mark.parametrize("kind", ["reward", "ppo"])
def test_no_file_tells_where_things_lie_on_this_machine(kind: str, place: Path) -> None:
    """But for the base of an adapter, without which it could not be loaded."""
    final = trained(place, kind, {"model.lora": LORA})
    role = "reward" if kind == "reward" else "policy"
    assert main(["export", "run", "out", "--role", role]) == 0
    for folder in (final / role, Path("out")):
        card = (folder / CARD).read_text()
        assert "private-folder" not in card
        assert front_matter(card)["library_name"] == "peft"
        assert "base_model" not in front_matter(card)
        assert "Started from: `language_model` (a folder of its author)" in card
    assert main(["export", "run", "whole", "--role", role, "--merge"]) == 0
    assert front_matter(Path("whole", CARD).read_text())["library_name"] == "transformers"
    for path in Path("whole").iterdir():
        assert b"private-folder" not in path.read_bytes(), path


def test_names_on_the_hub_stand_in_the_front_matter(sft: Path) -> None:
    saved = sft / "run" / "config.resolved.json"
    config = json.loads(saved.read_text())
    config["model"] |= {"path": "owner/model", "config": None}
    config["data"]["sources"][0]["path"] = "owner/texts"
    saved.write_text(json.dumps(config))
    assert main(["export", "run", "out"]) == 0
    matter = front_matter(Path("out", CARD).read_text())
    assert (matter["base_model"], matter["datasets"]) == ("owner/model", ["owner/texts"])


def test_a_card_that_a_user_put_there_stays(place: Path) -> None:
    final = trained(place, "sft")
    (final / "policy" / CARD).write_text("mine")
    assert run("sft", recipe_of("sft", place), RunOptions(quiet=True, resume="auto")) == 0
    assert (final / "policy" / CARD).read_text() == "mine"
    (final / "policy" / CARD).unlink()
    assert run("sft", recipe_of("sft", place), RunOptions(quiet=True, resume="auto")) == 0
    assert "from step 5" in (final / "policy" / CARD).read_text()


def test_saving_an_adapter_leaves_a_card_as_it_was_and_makes_none(tmp_path: Path) -> None:
    adapted = LanguageModel(tiny_language_model()).with_adapter(LoRAOptions(rank=2, alpha=4))
    save_pretrained(adapted.model, tmp_path / "new")
    assert not (tmp_path / "new" / CARD).exists()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / CARD).write_text("mine")
    save_pretrained(adapted.model, tmp_path / "old")
    assert (tmp_path / "old" / CARD).read_text() == "mine"


def test_a_run_whose_settings_cannot_be_read_has_a_short_card(sft: Path) -> None:
    (sft / "run" / "config.resolved.json").write_text("{")
    (sft / "run" / "metrics.jsonl").unlink()
    assert main(["export", "run", "out"]) == 0
    card = Path("out", CARD).read_text()
    assert "from step 5 of a training run" in card
    assert "How it was trained" not in card


def test_a_run_without_a_checkpoint_has_no_card(tmp_path: Path) -> None:
    write_final_cards(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("refusal", [ConnectionError, hub.HTTPError])
def test_without_a_network_the_folder_is_kept_and_the_way_told(
    refusal: type[Exception], sft: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def create_repo(*_: Any, **__: Any) -> Any:
        raise refusal("offline mode is enabled")

    monkeypatch.setattr(hub.huggingface_hub, "HfApi", lambda: SimpleNamespace(create_repo=create_repo))
    assert main(["export", "run", "out", "--push", "mine"]) == 1
    said = capsys.readouterr().err
    assert "out is written, but it could not be pushed to mine: offline mode is enabled" in said
    assert "hf upload mine out" in said
    assert Path("out", "model.safetensors").is_file()


def test_an_adapter_above_a_folder_is_not_pushed(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    trained(place, "sft", {"model.lora": LORA})
    pushed: list[str] = []
    answer = SimpleNamespace(url="there")
    monkeypatch.setattr("proximo.commands.export.push_folder", lambda _, name, **__: (pushed.append(name), answer)[1])
    assert main(["export", "run", "out", "--push", "mine"]) == 2
    assert "add --merge" in capsys.readouterr().err
    assert not Path("out").exists()
    assert main(["export", "run", "out", "--push", "mine", "--merge"]) == 0
    assert pushed == ["mine"]
