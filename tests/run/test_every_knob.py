"""Every key of a recipe does what changes a run. Not what it does: that is what the tests of its subject hold.

For each field of each section two tiny runs that differ in it alone, and the demand that they come out different: in
metrics, samples, weights, files, the number of passes through the modules of the models, or the error that ends them.
A field without a row in knobs.py fails the last test.
"""

import hashlib
import inspect
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any, get_args

import datasets
import huggingface_hub.constants
import pytest
import torch
from pydantic import BaseModel
from torch.nn.modules.module import register_module_forward_hook

from builders import tiny_language_model, tiny_tokenizer
from proximo.config.schema.base import Section
from proximo.config.schema.fields import annotation_at, child_of, section_for
from proximo.errors import ProximoError
from proximo.metrics.catalogue import catalogue
from proximo.models.language import LanguageModel
from proximo.models.pretrained.saving import save_pretrained
from proximo.models.scalar import HeadStart, scalar_from_language_model
from proximo.run.options import RunOptions
from proximo.trainer_kinds import recipe_kind, recipe_kinds
from run.knobs import ELSEWHERE, KNOBS, TEMPLATE, Changes, Knob, rows
from run_outcomes import read_lines
from tiny_runs import KINDS, Kind, changed, make_inputs, recipe_of
from tiny_runs import run as run_recipe

pytestmark = pytest.mark.usefixtures("no_report_no_fsync")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The inputs of the tiny runs, and a second one of each kind."""
    place = make_inputs(tmp_path_factory.mktemp("inputs"))
    tokenizer = tiny_tokenizer()
    save(tiny_language_model(seed=8, num_hidden_layers=1), place / "other_model", tokenizer)
    dropout = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
    save(tiny_language_model("gpt2", n_embd=16, n_layer=1, n_head=2, **dropout), place / "with_dropout", tokenizer)
    scorer = scalar_from_language_model(LanguageModel(tiny_language_model(seed=8)), HeadStart.NORMAL, seed=9)
    save(scorer.model, place / "other_scorer", tokenizer)
    tokenizer.save_pretrained(place / "other_tokenizer")
    swap_ids(place / "other_tokenizer" / "tokenizer.json", "a", "b")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(place / "other_template")
    write_rows(place / "other.jsonl", rows())
    write_rows(place / "both.jsonl", [{"text": row["prompt"], **row} for row in rows()])
    (place / "lines.txt").write_text("\n\n".join(f"a text\n--\nof {row['prompt']}" for row in rows()))
    splits = datasets.DatasetDict({name: datasets.Dataset.from_list(rows(name[:2])) for name in ("first", "second")})
    splits.save_to_disk(place / "splits")
    for model in ("model", "scorer"):
        sources = {"model": ("language_model", "other_model"), "scorer": ("reward_model", "other_scorer")}[model]
        store_on_hub(place / "hub", f"owner/{model}", dict(zip(("main", "second"), sources, strict=True)), place)
    return place


def save(model: torch.nn.Module, folder: Path, tokenizer: Any) -> None:
    save_pretrained(model, folder)
    tokenizer.save_pretrained(folder)


def swap_ids(path: Path, first: str, second: str) -> None:
    written = json.loads(path.read_text())
    vocabulary = written["model"]["vocab"]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(written))


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def store_on_hub(cache: Path, name: str, revisions: Mapping[str, str], place: Path) -> None:
    """A model with several revisions as the Hub's own cache keeps it: it is read from there without a network."""
    folder = cache / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    for number, (revision, source) in enumerate(revisions.items()):
        commit = f"{number}" * 40
        (folder / "refs" / revision).write_text(commit)
        shutil.copytree(place / source, folder / "snapshots" / commit)


@pytest.fixture(autouse=True)
def hub(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub that has the models of `place`."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(place / "hub"))


def filled(value: Any, place: Path) -> Any:
    """`$` in texts replaced by the folder of the inputs."""
    if isinstance(value, dict):
        return {name: filled(each, place) for name, each in value.items()}
    if isinstance(value, list):
        return [filled(each, place) for each in value]
    return value.replace("$", f"{place}") if isinstance(value, str) else value


def outcome(kind: Kind, changes: Changes, place: Path, folder: Path) -> dict[str, Any]:
    """What can be seen of a run of a few steps, but for what differs anyway: its recipe, its times and its name."""
    recipe = changed(recipe_of(kind, place), {"ppo.num_steps": 2} if kind == "ppo" else {f"{kind}.num_epochs": 1})
    recipe = changed(recipe, filled(dict(changes), place) | {"run.folder": str(folder)})
    with counted_passes() as passes:
        try:
            status: Any = run_recipe(kind, recipe, RunOptions(quiet=True))
        except ProximoError as error:
            return {"error": re.sub(r"\d+", "#", str(error)), "passes": passes}
    return {
        "status": status,
        "passes": passes,
        "metrics": [catalogue().repeatable(line) for line in read_lines(folder / "metrics.jsonl")],
        "samples": read_lines(folder / "samples.jsonl") if (folder / "samples.jsonl").exists() else None,
        "files": {
            re.sub(r"\d{9,}.*", "", str(path.relative_to(folder))): content(path)
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        },
    }


def content(path: Path) -> str | None:
    """Of weights; other files hold the recipe, or times."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.suffix == ".safetensors" else None


@contextmanager
def counted_passes() -> Iterator[Counter[str]]:
    """How often modules of each class were passed through."""
    passes: Counter[str] = Counter()

    def count(module: torch.nn.Module, *_: Any) -> None:
        passes[type(module).__name__] += 1

    handle = register_module_forward_hook(count)
    try:
        yield passes
    finally:
        handle.remove()


BASES: dict[str, dict[str, Any]] = {}
"""Outcomes of the bases that several knobs share."""


@pytest.mark.parametrize("knob", KNOBS, ids=lambda knob: f"{knob.kind}: {knob.key}")
def test_a_run_with_another_value_comes_out_different(knob: Knob, place: Path, tmp_path: Path) -> None:
    key = json.dumps([knob.kind, knob.base], sort_keys=True)
    if key not in BASES:
        BASES[key] = outcome(knob.kind, knob.base, place, tmp_path / "base")
    assert "error" not in BASES[key], f"the base is to run through: {BASES[key]['error']}"
    found = outcome(knob.kind, {**knob.base, knob.key: knob.value}, place, tmp_path / "changed")
    assert found != BASES[key], f"{knob.key} changed nothing"
    assert re.search(knob.stops, found.get("error", "")) if knob.stops else "error" not in found, found.get("error")


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_recipe_comes_out_the_same(kind: Kind, place: Path, tmp_path: Path) -> None:
    assert outcome(kind, {}, place, tmp_path / "one") == outcome(kind, {}, place, tmp_path / "two")


def sections_within(section: type[Section]) -> set[type[Section]]:
    """The section and all that its fields hold, at any depth."""
    found = {section}
    for each in section.model_fields.values():
        for kind in kinds_within(each.annotation):
            found |= sections_within(kind)
    return found


def kinds_within(annotation: Any) -> list[type[Section]]:
    if inspect.isclass(annotation) and issubclass(annotation, Section):
        return [annotation]
    return [kind for part in get_args(annotation) for kind in kinds_within(part)]


def turned_by(knob: Knob) -> str:
    """The key as `Section.key`, with the section that declares it first: what several kinds inherit is one key."""
    schema = recipe_kind(knob.kind).schema
    tree = changed(recipe_of(knob.kind, Path("place")), {**knob.base, knob.key: knob.value})
    path = tuple(knob.key.split(".")) + (("kind",) if knob.key[-1].isdecimal() else ())
    for end in range(len(path), 0, -1):
        section = section_for(annotation_at(schema, tree, path[: end - 1]), reduce(child_of, path[: end - 1], tree))
        if section is not None and path[end - 1] in section.model_fields:
            return first_name(section, path[end - 1])
    raise AssertionError(f"{knob.key} is no key of {knob.kind}")


def first_name(section: type[BaseModel], name: str) -> str:
    return f"{[base for base in section.__mro__ if name in getattr(base, 'model_fields', ())][-1].__name__}.{name}"


def test_no_key_is_left_out() -> None:
    shown, elsewhere = {turned_by(knob) for knob in KNOBS}, re.compile("|".join(ELSEWHERE.values()))
    sections = set().union(*(sections_within(kind.schema) for kind in recipe_kinds()))
    for section in sections:
        for name, field_ in section.model_fields.items():
            holder = first_name(section, name) in shown
            holder = holder or any(elsewhere.fullmatch(f"{parent.__name__}.{name}") for parent in section.__mro__)
            assert holder or kinds_within(field_.annotation), f"{section.__name__}.{name} has no row"
    texts = (path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py"))
    tests = {name for text in texts for name in re.findall(r"def (test_\w+)\(", text)}
    assert set(ELSEWHERE) <= tests
