"""What a run refuses of its input before the first step, its dry run refuses with the same sentence.

What only tokens, weights or a service show is left to the run.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForCausalLM

from builders import CHAT_TEMPLATE
from proximo.cli import main
from proximo.models.lora import LoRAOptions, add_adapter
from proximo.models.pretrained.saving import save_pretrained
from proximo.run.options import RunOptions
from tiny_runs import Kind, changed, make_inputs, recipe_of
from tiny_runs import run as run_recipe

KINDS: tuple[Kind, ...] = ("sft", "reward", "prm", "dpo", "kto", "ppo")
MESSAGES = [{"role": "user", "content": "ab"}]
ANSWERED = [*MESSAGES, {"role": "assistant", "content": "cd", "weight": 0}]
PAIR = {"prompt": "ab", "chosen": "cd", "rejected": "ef"}
ROWS: dict[Kind, dict[str, Any]] = {
    "sft": {"prompt": "ab", "response": "cd"},
    "reward": PAIR,
    "prm": {"prompt": "ab", "steps": ["a"], "labels": [1]},
    "dpo": PAIR,
    "kto": {"prompt": "ab", "response": "cd", "label": True},
    "ppo": {"prompt": "ab"},
}
LORA = {"rank": 2, "alpha": 4.0}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The inputs of all trainers, and two adapters of language models, one of them as peft leaves it."""
    place = make_inputs(tmp_path_factory.mktemp("inputs"))
    base = AutoModelForCausalLM.from_pretrained(place / "language_model")
    base.name_or_path = str(place / "language_model")
    save_pretrained(add_adapter(base, LoRAOptions(rank=2, seed=5)), place / "bare_adapter")
    shutil.copytree(place / "tokenizer", place / "plain_tokenizer", ignore=shutil.ignore_patterns("*.jinja"))
    shutil.copytree(place / "reward_model", place / "without_tokenizer", ignore=shutil.ignore_patterns("*token*"))
    return place


@dataclass(frozen=True)
class Place:
    """A folder of a test, beside the inputs of all."""

    inputs: Path
    folder: Path
    capsys: pytest.CaptureFixture[str]

    def with_rows(self, kind: Kind, rows: list[dict[str, Any]], changes: dict[str, Any]) -> dict[str, Any]:
        """The recipe of a trainer with rows of its own."""
        path = self.folder / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = {"data.sources": [{"path": str(path)}], "data.held_out_rows": 0}
        return changed(recipe_of(kind, self.inputs), {**data, **changes})

    def refusal_of(self, kind: Kind, recipe: dict[str, Any]) -> str:
        """What both the dry run and the run end with."""
        path = self.folder / "r.yaml"
        path.write_text(yaml.safe_dump(recipe))
        said = []
        for how in ("--dry-run", "--overwrite"):
            assert main([kind, str(path), how]) == 2
            said.append(self.capsys.readouterr().err.rpartition("error: ")[2])
        assert said[0] == said[1]
        return said[0]


@pytest.fixture
def place(inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Place:
    return Place(inputs, tmp_path, capsys)


SYSTEM: tuple[Any, ...] = ({}, {"data.system": "be kind"}, "a system message is given, but the prompts are text")


@pytest.mark.parametrize(
    ("kind", "change", "settings", "piece"),
    [
        ("sft", {"system": "be kind"}, {}, "column 'system' is for a chat template"),
        ("reward", {"history": [["a", "b"]]}, {}, "column 'history' is for a chat template"),
        ("dpo", {"id": "same"}, {}, "id 'same' is already that of"),
        (
            "kto",
            {},
            {"data.as_messages": True, "tokenizer.path": "plain_tokenizer"},
            "messages need a chat template, and",
        ),
        *((kind, *SYSTEM) for kind in KINDS),
    ],
)
def test_rows(place: Place, kind: Kind, change: dict[str, Any], settings: dict[str, Any], piece: str) -> None:
    if "tokenizer.path" in settings:
        settings = {**settings, "tokenizer.path": str(place.inputs / settings["tokenizer.path"])}
    assert piece in place.refusal_of(kind, place.with_rows(kind, [ROWS[kind] | change] * 2, settings))


@pytest.mark.parametrize(
    ("kind", "row", "settings", "piece"),
    [
        ("sft", {"messages": ANSWERED}, {"data.train_on": "everything"}, "a message has weight 0"),
        ("ppo", {"prompt": MESSAGES}, {"data.first_words": 2}, "first_words is for text prompts"),
        ("ppo", {"prompt": "ab"}, {"reward": [{"kind": "maths"}]}, "a maths reward needs a reference answer"),
        ("ppo", {"prompt": "ab"}, {"reward": [{"kind": "countdown"}]}, "reward source 'countdown'"),
    ],
)
def test_rows_of_one_trainer(
    place: Place, kind: Kind, row: dict[str, Any], settings: dict[str, Any], piece: str
) -> None:
    changes = {"tokenizer.chat_template": CHAT_TEMPLATE, **settings}
    if "reward" in settings:
        changes["value.init_from"] = "policy"
    assert piece in place.refusal_of(kind, place.with_rows(kind, [row], changes))


def test_the_texts_beside_ppo(place: Place) -> None:
    texts = place.folder / "texts.jsonl"
    texts.write_text('{"prompt": "a", "response": "b", "system": "be kind"}\n')
    changes = {
        "ptx_data": {"sources": [{"path": str(texts)}]},
        "ppo.ptx": {"coefficient": 1.0, "examples_per_update": 1},
    }
    said = place.refusal_of("ppo", changed(recipe_of("ppo", place.inputs), changes))
    assert "column 'system' is for a chat template" in said


@pytest.mark.parametrize(
    ("kind", "changes", "piece"),
    [
        ("sft", {"model": {"path": "bare_adapter", "lora": LORA}}, "model.path: "),
        ("dpo", {"model": {"path": "bare_adapter", "lora": LORA}}, "is an adapter itself, and a new one (lora)"),
        ("ppo", {"model": {"path": "bare_adapter"}, "value": {"lora": LORA}}, "value.lora: "),
        ("reward", {"model": {"path": "bare_adapter"}}, "holds an adapter only"),
        ("prm", {"model": {"path": "bare_adapter"}}, "holds an adapter only"),
        ("ppo", {"reward": [{"kind": "model", "path": "bare_adapter"}]}, "reward.0.path: "),
        ("ppo", {"reward": [{"kind": "model", "path": "without_tokenizer"}]}, "reward.0.tokenizer: "),
        ("reward", {"model": {"path": "without_tokenizer"}, "tokenizer": {}}, "holds no tokenizer"),
        ("sft", {"model": {"path": "without_tokenizer"}, "tokenizer": {}}, "tokenizer.path: "),
    ],
)
def test_models_and_their_tokenizers(place: Place, kind: Kind, changes: dict[str, Any], piece: str) -> None:
    recipe = recipe_of(kind, place.inputs) | json.loads(json.dumps(changes))
    for section in [recipe["model"], *(recipe["reward"] if kind == "ppo" else ())]:
        if "path" in section:
            section["path"] = str(place.inputs / section["path"])
    assert piece in place.refusal_of(kind, recipe)


def test_a_reference_with_rows_for_other_tokens(place: Place) -> None:
    other = shutil.copytree(place.inputs / "language_model", place.folder / "other")
    config = json.loads((other / "config.json").read_text(encoding="utf-8"))
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": 128}), encoding="utf-8")
    changes = {"model": {"path": str(place.inputs / "language_model")}, "reference": {"path": str(other)}}
    said = place.refusal_of("ppo", changed(recipe_of("ppo", place.inputs), changes))
    assert "the reference gives logits for 128 tokens, the policy for 64" in said


def test_an_adapter_without_a_tokenizer_has_that_of_its_base(inputs: Path, tmp_path: Path) -> None:
    assert not list((inputs / "bare_adapter").glob("*token*"))
    changes = {"model": {"path": str(inputs / "bare_adapter")}, "run.folder": str(tmp_path / "run"), "tokenizer": {}}
    recipe = changed(recipe_of("sft", inputs), changes)
    assert run_recipe("sft", recipe, RunOptions(quiet=True)) == 0
    saved = json.loads((inputs / "tokenizer" / "tokenizer.json").read_text())["model"]["vocab"]
    kept = next((tmp_path / "run" / "checkpoints").glob("step-*/policy/tokenizer.json"))
    assert json.loads(kept.read_text())["model"]["vocab"] == saved


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("sft", "held_out_rows"),
        ("dpo", "evaluation_sources"),
        ("kto", "held_out_rows"),
        ("reward", "evaluation_sources"),
    ],
)
def test_what_is_not_used_is_counted_alike(place: Place, kind: Kind, source: str) -> None:
    """Of rows, with the words of the run."""
    row = ROWS[kind] | {"origin": "a book"}
    rows = [row | ({"label": number % 2 == 0} if kind == "kto" else {}) for number in range(10)]
    recipe = place.with_rows(kind, rows, {"data.held_out_rows": 2})
    if source == "evaluation_sources":
        recipe["data"] |= {"held_out_rows": 0, "evaluation_sources": recipe["data"]["sources"]}
    recipe["run"]["folder"] = str(place.folder / "run")
    (place.folder / "r.yaml").write_text(yaml.safe_dump(recipe))
    assert main([kind, str(place.folder / "r.yaml"), "--dry-run"]) == 0
    lines = [line.strip() for line in place.capsys.readouterr().out.splitlines()]
    found = [line for line in lines if "not used" in line]
    assert len(found) == (1 if source == "held_out_rows" else 2)
    assert main([kind, str(place.folder / "r.yaml")]) == 0
    log = (place.folder / "run" / "log.txt").read_text()
    for line in found:
        rest = line.removeprefix("evaluation rows: ")
        where = "evaluation rows: " if rest != line else ""
        assert any(each.startswith(where) and rest in each for each in log.splitlines()), line
